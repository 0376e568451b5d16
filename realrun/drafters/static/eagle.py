"""EAGLE's pass over static caches (`realrun.drafters.eagle.EagleLM`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from realrun.drafters.static.given import GIVEN, Given, StaticStateDrafter
from realrun.drafters.static.inside import with_layers
from realrun.lm.static.sizes import Rows
from realrun.lm.static.split import StaticSplitTarget
from specsim.arrays import Bools, Ints

OWN = Given(0, true=False)


class StaticEagle(StaticStateDrafter):
    """The layer; features [capacity, d] are what it has put out, by slot.

    Given rows are fused with true features, and so is the row of the pending token; a row behind it with what the row
    before it in the text has put out, which stands in its source.

    fuse : of embeddings and features, [N, d] each, what the layer is fed
    """

    caches_pending_token = True

    def __init__(self, target: StaticSplitTarget, layers: Sequence[Any], fuse: Callable[..., torch.Tensor]):
        self.fuse = fuse
        super().__init__(target, with_layers(target.model, layers))
        self.features = self.keys.new_empty(self.capacity, self.embedding.shape[1])

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        before = self.capacity
        super().reserve(length)
        if self.capacity > before:
            self.features = F.pad(self.features, (0, 0, 0, self.capacity - before))

    def _given_input(self, rows: Rows) -> torch.Tensor:
        above = rows.slots - 1
        true = self._pieces.norm(self.target.states[above.clamp(min=0)], self.norm_out, self.eps)
        return self.fuse(self._embedded(rows), torch.where((above >= 0)[:, None], true, 0))  # zeros before the first

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        start, end = self.length, self.length + len(tokens)
        if start > self.target.length:  # a token that it drafted itself
            assert len(tokens) == 1
            return tokens, start, OWN
        assert end <= self.target.length + 1
        self.given = end
        return tokens[-1:], end - 1, Given(self._get_ready(tokens[:-1], start), true=True)

    def _variants(self, n: int) -> Sequence[Hashable]:
        return (OWN, *(Given(count, true=True) for count in (0, *GIVEN))) if n == 1 else (OWN,)

    def _sources(self, visible: Bools) -> Ints:
        """The slots of the nodes' parents."""
        n, nodes = visible.shape
        assert not visible[:, nodes - n :][~np.eye(n, dtype=np.bool_)].any(), "nodes of one level come in one pass"
        above = visible[:, : nodes - n]
        last = above.shape[1] - 1 - above[:, ::-1].argmax(axis=1) if above.shape[1] else np.zeros(n, np.int64)
        return np.where(above.any(axis=1), last, -1) - (nodes - n)

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, Given)
        if variant.rows:
            self._fill_given(variant)
        return self._given_input(rows) if variant.true else self.fuse(self._embedded(rows), self.features[rows.sources])

    def _embedded(self, rows: Rows) -> torch.Tensor:
        return super()._input(rows, None)

    def _through(self, rows: Rows, variant: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        features, _ = self.stack.run(self._input(rows, variant), rows)
        self.features[rows.slots] = features
        return self._of_states(features, rows), features
