"""Train MEDUSA-1: K heads on the last state of a frozen target (Cai et al. 2024, 3.2.1).

    L = sum_{k=1}^{K} 0.8^k L_k,      L_k = -log p_t^(k)(y_{t+k+1})

The paper prints the total without its minus (errata E2). Labels are the text's tokens, of which a
share was written by the target itself (3.3.2). The optimizer is plain AdamW where the paper has an
8-bit one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.pair import Pair
from realrun.training.common.distill import TextSettings
from realrun.training.common.frozen import train_on_frozen_target
from realrun.training.common.loop import LoopSettings, Tensors, wide
from specsim.errors import InputError
from specsim.progress import Progress


@dataclass(frozen=True)
class MedusaSettings:
    """heads : K; lr : its peak; decay : lambda_k = decay^k"""

    heads: int = 4
    lr: float = 3e-3
    decay: float = 0.8
    text: TextSettings = field(default_factory=TextSettings)

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.decay > 0):
            raise InputError(f"learning rate {self.lr} and decay {self.decay} of MEDUSA; give more than 0")


class HeadsTraining:
    """What MEDUSA-1 trains, for `realrun.training.common.loop`: float32 masters of the heads; the target is frozen."""

    def __init__(self, target: Any, settings: MedusaSettings):
        self.target, self.settings = target.requires_grad_(False), settings
        self.heads = MedusaHeads(target, settings.heads)
        if target.dtype.itemsize < 4:
            self.heads.float()
        self.heads.requires_grad_(True)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.heads.parameters()), "lr": self.settings.lr}]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """L of a batch [B, T + 1], and "head_1" to "head_K", in nats a token."""
        losses = head_losses(self.heads, self._states(batch), batch)
        total = torch.stack([self.settings.decay**k * loss for k, loss in enumerate(losses, start=1)]).sum()
        return total, {f"head_{k}": float(loss.detach()) for k, loss in enumerate(losses, start=1)}

    def state(self) -> Tensors:
        return self.heads.state_dict()

    def load_state(self, tensors: Tensors) -> None:
        self.heads.load_state_dict(tensors)

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """head_k, its loss in nats; head_k_agreement, how often it prefers what the target itself prefers k later."""
        hidden = self._states(batch)
        preferred = self.target.get_output_embeddings()(hidden).argmax(-1)
        figures = {}
        for k, logits in enumerate(head_logits(self.heads, hidden), start=1):
            labels = batch[:, k + 1 :]
            figures[f"head_{k}"] = float(F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten()))
            figures[f"head_{k}_agreement"] = float((logits.argmax(-1) == preferred[:, k:]).double().mean())
        return figures

    @torch.no_grad()
    def _states(self, batch: torch.Tensor) -> torch.Tensor:
        """The target's states [B, T, d] after its final norm, at all tokens of a batch [B, T + 1] but the last."""
        states: torch.Tensor = self.target.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return states


def head_logits(heads: MedusaHeads, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits [B, T - k, V] of head k = 1 .. K at states [B, T, d]: those whose token k + 1 later the text still has."""
    for k, (residual, vocabulary) in enumerate(zip(heads.residual, heads.vocabulary, strict=True), start=1):
        source = hidden[:, : hidden.shape[1] - k]
        yield F.linear(F.silu(F.linear(source, residual)) + source, vocabulary)


def head_losses(heads: MedusaHeads, hidden: torch.Tensor, batch: torch.Tensor) -> list[torch.Tensor]:
    """L_k of head k = 1 .. K, means in nats, at the states [B, T, d] of a batch [B, T + 1]."""
    return [
        F.cross_entropy(wide(logits).flatten(0, 1), batch[:, k + 1 :].flatten())
        for k, logits in enumerate(head_logits(heads, hidden), start=1)
    ]


def train_medusa(
    pair: Pair,
    settings: MedusaSettings,
    loop: LoopSettings,
    out: Path,
    progress: Progress,
    *,
    cache: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Train heads on the pair's target, as `train_on_frozen_target` does; facts and history."""
    if loop.window_tokens <= settings.heads:
        raise InputError(
            f"windows of {loop.window_tokens} tokens are too short for {settings.heads} heads; give longer ones"
        )
    job = HeadsTraining(pair.target, settings)
    return train_on_frozen_target(
        pair, "medusa", "medusa-1", job, settings, loop, out, progress, cache=cache, dtype=dtype
    )
