"""Self-SD's drafter (Draft & Verify, Zhang et al. 2023b): the target with some of its sublayers skipped.

It reads the target's own keys and values of all verified tokens, writes those of the pending
token and of what it drafts behind them, and verification overwrites these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrun.lm.cached import CachedLM
from realrun.lm.skipped_layers import SkippedSublayers
from realrun.lm.split_target import SplitTarget


class SkippingLM(CachedLM):
    """The target's layers less the skipped sublayers, over its cache.

    `length` follows the target's: whatever was verified is there, so that a round always starts with the
    pending token alone.

    ahead : tokens fed since the target's last pass
    """

    def __init__(self, target: SplitTarget, skips: SkippedSublayers):
        assert target.split == 0
        self.target, self.skips = target, skips
        super().__init__(target.model)

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

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        start = self.length + self.nodes
        at = torch.tensor(positions, device=self.device)
        logits = self._run(tokens, start, at, self.target.pieces.tree_mask(seen, start + len(tokens)), keep)
        self.nodes += len(tokens)
        return logits

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end = self.length, self.length + len(tokens)
        return self._run(tokens, start, slice(start, end), self.target.pieces.causal_mask(len(tokens), end), keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        start = self.length + self.nodes
        at = torch.tensor([self.length + depth for depth in depths], device=self.device)
        return self._run(tokens, start, at, self.target.pieces.tree_mask(visible, start + len(tokens)), keep=0)

    def _run(
        self,
        tokens: Sequence[int],
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        keep: int,
    ) -> torch.Tensor:
        target = self.target
        x = target.upper.run(target.pieces.embed(tokens), start, positions, mask, self.skips)
        hidden = target.pieces.normed(x[-keep:] if keep else x, target.norm)
        if self.keep_hidden:
            self.hidden = hidden
        return target.pieces.logits(hidden, target.head)

    def _check_trees(self) -> None:
        """As the target."""
