"""Self-SD's pass over the target's static cache (`realrun.drafters.self_sd.SkippingLM`)."""

from __future__ import annotations

import torch

from realrun.drafters.static.inside import InsideTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.variants.over_target import OverTarget
from realrun.lm.variants.skipped_layers import SkippedSublayers


class StaticSkipping(OverTarget, InsideTarget):
    """The target's layers less the skipped sublayers, in its own slots behind its tokens."""

    def __init__(self, target: StaticLlama, skips: SkippedSublayers):
        self.target, self.skips = target, skips
        super().__init__(target, target.model)

    def _make_stack(self, capacity: int | None) -> None:
        self.stack = self.target.stack

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length)
