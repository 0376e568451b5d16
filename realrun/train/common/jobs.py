"""Base classes of trainings: a module beside a frozen target, or an adapter on the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from realrun.drafters.kind import DRAFT_TOKENS
from realrun.train.common.folder import Tensors
from realrun.train.common.loop import Job, Tokens, wide

DRAFT_VOCABULARY = (
    "Draft only so many tokens, the most frequent ones of the training text; a draft step then reads less of the "
    "target's head (default: all)."
)
OWN_OR_TARGETS_HEAD = (
    "Draft only so many tokens, the most frequent ones of the training text, by the target's own head: a smaller file "
    "and faster steps (default: all tokens, by a head that is trained too)."
)


class ModuleJob(Job):
    """Trains all parameters of a module, in float32 at least, beside a frozen target.

    target : frozen
    module : trained; of the target's type, it is widened to float32 at least
    lr : peak of the learning rate
    draft_vocabulary : number of tokens to draft; None for all
    """

    draft_vocabulary: int | None = None

    def __init__(self, target: Any, module: Any, lr: float):
        self.target, self.module, self.lr = target.requires_grad_(False), module, lr
        if target.dtype.itemsize < 4:
            module.float()
        module.requires_grad_(True)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.module.parameters()), "lr": self.lr}]

    def state(self) -> Tensors:
        return dict(self.module.state_dict())

    def chosen(self, text: Sequence[tuple[Tokens, float]]) -> Tensors:
        """Choose the tokens to draft, in ascending order."""
        if self.draft_vocabulary is None:
            return {}
        counts = sum(np.bincount(tokens, minlength=self.target.config.vocab_size) for tokens, _ in text)
        most = np.argsort(-np.asarray(counts), kind="stable")[: self.draft_vocabulary]
        return {DRAFT_TOKENS: torch.from_numpy(np.sort(most).astype(np.int32))}

    def load_state(self, tensors: Tensors) -> None:
        self.module.load_state_dict(tensors)


class TunedTargetJob(Job):
    """Changes the target itself; figures of held-out text are of what the file will hold.

    stored : type that the drafter's file rounds to
    """

    stored: torch.dtype

    @torch.no_grad()
    def load_state(self, tensors: Tensors) -> None:
        for name, value in self.state().items():
            value.copy_(tensors[name])

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Round the trained values, during the block, as the drafter's file does."""
        exact = {name: value.detach().clone() for name, value in self.state().items()}
        self.load_state({name: value.to(self.stored) for name, value in exact.items()})
        try:
            yield
        finally:
            self.load_state(exact)


def cross_entropy_nats(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy of logits [..., V] with tokens [...], in nats."""
    return F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten())


def kl_nats(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """Compute the mean over rows of KL(theirs || ours), in nats, of two sets of logits [..., V]."""
    p, q = (F.log_softmax(wide(x), dim=-1).flatten(0, -2) for x in (theirs, ours))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)
