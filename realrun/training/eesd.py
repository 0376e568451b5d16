"""Train EESD's early exit: layers, norm and head on the target's frozen first N layers (Liu et al. 2024, 3.1, 3.2).

The loss is the cross-entropy with the next token of the text, of which a share was written by the
target itself. A step runs the first N layers and the exit's; the target's other layers rest. The
paper's ablations are settings: no exit layer (`exit_layers` 0) and no self-distillation
(`generated_share` 0 of the text).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.eesd import EarlyExit, as_model
from realrun.pairs.pair import Pair
from realrun.training.common.distill import TextSettings
from realrun.training.common.frozen import train_on_frozen_target
from realrun.training.common.loop import LoopSettings, Tensors, wide
from specsim.errors import InputError
from specsim.progress import Progress


@dataclass(frozen=True)
class EesdSettings:
    """layers : N, that stay below; exit_layers : E, trained on top, 0 for a norm and a head alone; lr : its peak"""

    layers: int = 2
    exit_layers: int = 1
    lr: float = 3e-3
    text: TextSettings = field(default_factory=TextSettings)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"a learning rate of {self.lr}; give more than 0")


class EarlyExitTraining:
    """What EESD trains, for `realrun.training.common.loop`: float32 masters of the exit; the target is frozen."""

    def __init__(self, target: Any, settings: EesdSettings):
        self.target, self.lr = target.requires_grad_(False), settings.lr
        self.exit = EarlyExit(target, settings.layers, settings.exit_layers)
        if target.dtype.itemsize < 4:
            self.exit.float()
        self.exit.requires_grad_(True)
        self.model = as_model(target, self.exit)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.exit.parameters()), "lr": self.lr}]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Cross-entropy with the next token of a batch [B, T + 1], in nats a token."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(wide(logits).flatten(0, 1), batch[:, 1:].flatten()), {}

    def state(self) -> Tensors:
        return self.exit.state_dict()

    def load_state(self, tensors: Tensors) -> None:
        self.exit.load_state_dict(tensors)

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """nats : the loss; agreement : how often the exit and the target prefer the same token after a text's."""
        logits, theirs = (model(input_ids=batch[:, :-1], use_cache=False).logits for model in (self.model, self.target))
        return {
            "nats": float(F.cross_entropy(wide(logits).flatten(0, 1), batch[:, 1:].flatten())),
            "agreement": float((logits.argmax(-1) == theirs.argmax(-1)).double().mean()),
        }


def train_eesd(
    pair: Pair,
    settings: EesdSettings,
    loop: LoopSettings,
    out: Path,
    progress: Progress,
    *,
    cache: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Train an early exit of the pair's target, as `train_on_frozen_target` does; facts and history."""
    job = EarlyExitTraining(pair.target, settings)
    return train_on_frozen_target(pair, "eesd", "eesd", job, settings, loop, out, progress, cache=cache, dtype=dtype)
