"""EDD's pass over static caches (`realrun.drafters.edd.EffectiveDraftDecoderLM`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from realrun.drafters.static.given import GIVEN, Given, StaticStateDrafter
from realrun.lm.static.sizes import Rows

OWN = Given(0, true=False)


class StaticDraftDecoder(StaticStateDrafter):
    """The decoder; given rows are soft prompts, of which only keys and values matter."""

    def _given_input(self, rows: Rows) -> torch.Tensor:
        return self.target.states[rows.slots]

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        start = self.length
        known = min(max(self.target.length - start, 0), len(tokens))
        if known:
            self.given = start + known
        return tokens[known:], start + known, Given(self._get_ready(tokens[:known], start), true=False)

    def _variants(self, n: int) -> Sequence[Hashable]:
        return (OWN, *(Given(count, true=False) for count in GIVEN)) if n == 1 else (OWN,)

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, Given)
        if variant.rows:
            self._fill_given(variant)
        return super()._input(rows, variant)
