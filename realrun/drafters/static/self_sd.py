"""Self-SD's pass over the target's static cache (`realrun.drafters.self_sd.SkippingLM`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrun.drafters.static.inside import InsideTarget
from realrun.lm.static.llama import StaticLlama
from realrun.lm.variants.skipped_layers import SkippedSublayers


class StaticSkipping(InsideTarget):
    """The target's layers less the skipped sublayers, in its own slots behind its tokens.

    ahead : tokens fed since the target's last pass
    """

    def __init__(self, target: StaticLlama, skips: SkippedSublayers):
        self.target, self.skips = target, skips
        super().__init__(target, target.model)

    def _make_stack(self, capacity: int | None) -> None:
        self.stack = self.target.stack

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length)

    @property
    def length(self) -> int:
        return self.target.length + self.ahead

    @length.setter
    def length(self, length: int) -> None:
        self.ahead = length - self.target.length

    def reset(self) -> None:
        self.ahead = self.nodes = 0
        self.hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """The target has fed them."""

    def truncate(self, length: int) -> None:
        self.ahead = self.nodes = 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        self.truncate(0)
