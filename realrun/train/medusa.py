"""Train MEDUSA-1: K heads on the last state of a frozen target (Cai et al. 2024, 3.2.1).

    L = sum_{k=1}^{K} 0.8^k L_k,      L_k = -log p_t^(k)(y_{t+k+1})

The paper prints the total without its minus (errata E2). Labels are the text's tokens, a share of which the target has
written (3.3.2). The optimizer is plain AdamW; the paper's is 8-bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.pair import Pair
from realrun.train.common.jobs import OWN_OR_TARGETS_HEAD, ModuleJob, cross_entropy_nats
from realrun.train.common.on_text import Method, TextRun, train_on_text
from specsim.io.settings import Settings, setting

OBJECTIVE = "sum over heads k of decay^k x cross-entropy with the text's token k + 1 ahead"


@dataclass(frozen=True)
class MedusaSettings(Settings):
    """Settings of MEDUSA-1's heads."""

    heads: int = setting(5, low=1, high=16, doc="Number of heads K; head k drafts the k-th token ahead.")
    lr: float = setting(3e-3, above=0, doc="Peak learning rate.")
    decay: float = setting(0.8, above=0, doc="Weight of head k's loss is this number to the power k.")
    draft_vocabulary: int | None = setting(None, low=1, doc=OWN_OR_TARGETS_HEAD)


class HeadsTraining(ModuleJob):
    """Trains MEDUSA-1's heads; the target is frozen."""

    def __init__(self, target: Any, settings: MedusaSettings):
        shared = settings.draft_vocabulary is not None
        super().__init__(target, MedusaHeads(target, settings.heads, shared), settings.lr)
        self.heads, self.settings, self.draft_vocabulary = self.module, settings, settings.draft_vocabulary

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute L of a batch [B, T + 1], and "head_1" to "head_K", in nats per token."""
        losses = head_losses(self.heads, self._states(batch), batch)
        total = torch.stack([self.settings.decay**k * loss for k, loss in enumerate(losses, start=1)]).sum()
        return total, {f"head_{k}": float(loss.detach()) for k, loss in enumerate(losses, start=1)}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """head_k, its loss in nats; head_k_agreement, how often it prefers what the target itself prefers k later."""
        hidden = self._states(batch)
        preferred = self.target.get_output_embeddings()(hidden).argmax(-1)
        figures = {}
        for k, logits in enumerate(head_logits(self.heads, hidden), start=1):
            labels = batch[:, k + 1 :]
            figures[f"head_{k}"] = float(cross_entropy_nats(logits, labels))
            figures[f"head_{k}_agreement"] = float((logits.argmax(-1) == preferred[:, k:]).double().mean())
        return figures

    @torch.no_grad()
    def _states(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the target's states [B, T, d] after its final norm, at the first T tokens of a batch [B, T + 1]."""
        states: torch.Tensor = self.target.base_model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return states


def head_logits(heads: MedusaHeads, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Compute logits [B, T - k, V] of head k = 1 .. K at the states [B, T, d] that have a text token k + 1 later."""
    vocabularies = heads.vocabulary.expand(len(heads), -1, -1)
    for k, (residual, vocabulary) in enumerate(zip(heads.residual, vocabularies, strict=True), start=1):
        source = hidden[:, : hidden.shape[1] - k]
        yield F.linear(F.silu(F.linear(source, residual)) + source, vocabulary)


def head_losses(heads: MedusaHeads, hidden: torch.Tensor, batch: torch.Tensor) -> list[torch.Tensor]:
    """Compute L_k of head k = 1 .. K, means in nats, at the states [B, T, d] of a batch [B, T + 1]."""
    return [
        cross_entropy_nats(logits, batch[:, k + 1 :]) for k, logits in enumerate(head_logits(heads, hidden), start=1)
    ]


def train_medusa(pair: Pair, settings: MedusaSettings, run: TextRun) -> dict[str, Any]:
    """Train heads on the pair's target; see `train_on_text`."""
    job = HeadsTraining(pair.target, settings)
    method = Method.of("medusa-1", asdict(settings), OBJECTIVE, kind="medusa", ahead=settings.heads)
    return train_on_text(pair, method, lambda: job, run)
