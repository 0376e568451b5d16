"""MEDUSA's drafter (Cai et al. 2024): K heads on the target's last state, each for a token further ahead.

    p_t^(k) = softmax(W_2^(k) (SiLU(W_1^(k) h_t) + h_t)),   k = 1 .. K

h_t is the state, after the final norm, that produced the pending token y_{t+1}; head k predicts y_{t+k+1} from it,
whatever the tokens between are. All heads run at once, in a round's first draft step; the other steps cost next to
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from realrun.decode.acceptance_predictor import Predictor, pending_token_states
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DRAFT_TOKENS, DrafterFacts, DrafterKind, draft_tokens, draft_vocabulary
from realrun.drafters.parallel_rows import ParallelRowsLM
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.lm.head import float32_product, gives_float32, spread
from realrun.lm.static.graphs import Results
from realrun.lm.variants import ADAPTER, tuned_target
from realrun.proposals.positionwise import Positionwise, positionwise_columns
from realrun.proposals.recorder import Columns, Recorder, RecordRequest
from specsim.io.errors import InputError


class MedusaHeads(torch.nn.Module):
    """K heads, each a residual block. residual [K, d, d], W_1; vocabulary [K, V, d], W_2.

    W_1 starts at zero and W_2 as the target's head, so that every head starts as the target's own
    prediction (the paper has the two the wrong way round; errata E1). The formula has no biases; the authors' published
    heads have one of W_1.

    shared : whether W_2 is the target's head itself in all heads, [1, V, d] and not part of the state; it is most of
        the weights of a head
    tokens : int64 [n], the tokens that a shared W_2 drafts, [1, n, d]; None for all
    bias : whether W_1 has a bias, [K, d]
    """

    def __init__(
        self, target: Any, heads: int, shared: bool = False, tokens: torch.Tensor | None = None, *, bias: bool = False
    ):
        super().__init__()
        if not 1 <= heads <= 16:
            raise InputError(f"{heads} MEDUSA heads; choose 1 to 16")
        head = target.get_output_embeddings().weight.detach()
        self.float32_logits = gives_float32(target)
        self.config = copy.deepcopy(target.config)
        self.tokens, self.out_features = tokens.to(head.device) if shared and tokens is not None else None, len(head)
        self.residual = torch.nn.Parameter(head.new_zeros(heads, head.shape[1], head.shape[1]))
        self.bias = torch.nn.Parameter(head.new_zeros(heads, head.shape[1])) if bias else None
        if shared:
            self.register_buffer("vocabulary", (head if tokens is None else head[tokens])[None], persistent=False)
        else:
            self.vocabulary = torch.nn.Parameter(head.expand(heads, *head.shape).clone())

    def __len__(self) -> int:
        return len(self.residual)

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute SiLU(W_1 h) + h, [K, n, d], from target states [n, d]."""
        mapped = torch.matmul(hidden, self.residual.transpose(1, 2))
        return F.silu(mapped if self.bias is None else mapped + self.bias[:, None]) + hidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [K, n, V] from target states [n, d]."""
        return self.all_logits(self.states(hidden))

    def all_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits [K, n, V] from all heads' states [K, n, d]."""
        return self._product(states, self.vocabulary.transpose(1, 2))

    def state(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Compute `states` of a single head, numbered from 0: [n, d]."""
        mapped = hidden @ self.residual[head].T
        return F.silu(mapped if self.bias is None else mapped + self.bias[head]) + hidden

    def logits(self, head: int, states: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, V] from a single head's states [n, d]."""
        return self._product(states, self.vocabulary[head if len(self.vocabulary) > 1 else 0].T)

    def _product(self, states: torch.Tensor, vocabulary: torch.Tensor) -> torch.Tensor:
        logits = (float32_product if self.float32_logits else torch.matmul)(states, vocabulary)
        return logits if self.tokens is None else spread(logits, self.tokens, self.out_features)


class MedusaLM(ParallelRowsLM):
    """The heads as a model; head i gives row i."""

    predictors = "MEDUSA heads"
    _known: tuple[torch.Tensor, torch.Tensor]  # logits and states of the round

    def __init__(self, target: CachedLM, heads: MedusaHeads):
        self.heads = heads
        size = heads.vocabulary.shape[2]
        super().__init__(target, target, len(heads), heads.out_features, size)
        self._source = heads.residual.new_zeros(1, size)  # graphs read it at this address

    def take(self, source: torch.Tensor | None) -> None:
        """Take up the target's state [d] that produced the pending token."""
        if source is None:
            self._source.zero_()
        else:
            self._source.copy_(source[None])

    @property
    def rows(self) -> int:
        return len(self.heads)

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        super().warm(sizes, length, tree_nodes)
        if tree_nodes and self.describes:
            self.recorded.run("all heads", self.fill_rows)

    def fill_rows(self) -> Results:
        states = self.heads.states(self._source)  # [K, 1, d]
        self.states.copy_(states[:, 0])
        self.logits.copy_(self.heads.all_logits(states)[:, 0])
        return self.states, self.logits

    def _round(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.step > 1:
            return self._known
        if self.describes:
            self.recorded.run("all heads", self.fill_rows)
            self._known = self.logits, self.states
        else:
            states = self.heads.states(self._source)
            self._known = self.heads.all_logits(states)[:, 0], states[:, 0]
        return self._known

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        return self._logits(len(tokens))

    def check_trees(self) -> None:
        """Do nothing: heads need no tree mask."""


class MedusaDrafter(DraftModel):
    """Drafts by the heads, which need the target's state of every round."""

    def __init__(self, target: CachedLM, heads: MedusaHeads, eos_token_ids: Sequence[int], predictor: Predictor | None):
        super().__init__(MedusaLM(target, heads), eos_token_ids, predictor)
        self.wants_target_hidden = True
        self.max_depth = len(heads)

    def enable_scores(self, scoring: bool) -> None:
        self.scoring = self.lm.keep_hidden = scoring

    def take_hidden(self, target_hidden: torch.Tensor | None) -> None:
        super().take_hidden(target_hidden)
        self.lm.take(target_hidden)  # type: ignore[attr-defined]


class HeadProposals(Positionwise):
    """The heads' proposals from states [T, d] of the target."""

    def __init__(self, heads: MedusaHeads, hidden: torch.Tensor):
        self.heads, self.hidden = heads, hidden

    def states(self, step: int) -> torch.Tensor:
        return self.heads.state(step, self.hidden)

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.heads.logits(step, states)


@torch.inference_mode()
def head_columns(target: Any, heads: MedusaHeads, request: RecordRequest) -> Columns:
    """Record what the heads propose at every position; a `Recorder` once target and heads are given.

    Columns at (t, i) are those of head i at the state that produced the pending token of round t.
    """
    if request.depth > len(heads):
        raise InputError(
            f"{len(heads)} MEDUSA heads draft at most {len(heads)} tokens, not {request.depth}; lower the depth"
        )
    proposed = HeadProposals(heads, pending_token_states(target, request.prompt, request.output))
    return positionwise_columns(target, proposed, request)


@dataclass(frozen=True, eq=False)
class MedusaKind(DrafterKind):
    """Heads on a target, which MEDUSA-2 has tuned.

    Its file holds the state of `MedusaHeads`, without vocabulary if all heads share the target's, fact "heads" (K), and
    MEDUSA-2's low-rank updates of its target as `realrun.lm.variants` reads them.
    """

    heads: MedusaHeads

    name: ClassVar[str] = "medusa"
    paper_policy: ClassVar[str | None] = "sparse_tree"

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        tuned = tuned_target(target, tensors, facts)
        if facts["heads"] != len(tensors["residual"]):  # checked before so many heads are made
            raise ValueError(f"{facts['heads']} heads, tensors of {len(tensors['residual'])}")
        shared, bias = "vocabulary" not in tensors, "bias" in tensors
        heads = MedusaHeads(tuned, facts["heads"], shared, draft_tokens(tensors), bias=bias)
        own = {name: tensors[name] for name in tensors if not name.startswith(ADAPTER) and name != DRAFT_TOKENS}
        if not shared:  # padding of the vocabulary stands for no token
            own["vocabulary"] = own["vocabulary"][:, : heads.out_features]
        heads.load_state_dict(own)
        return tuned, cls(heads.eval())

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        lm = make_lm(target)
        return lm, MedusaDrafter(lm, self.heads, eos_token_ids, predictor)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return partial(head_columns, target, self.heads)

    @property
    def max_depth(self) -> int:
        return len(self.heads)

    @property
    def facts(self) -> DrafterFacts:
        return {"heads": len(self.heads), **draft_vocabulary(self.heads.tokens)}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.heads,)
