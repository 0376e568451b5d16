"""The attention and MLP sublayers of a model that a draft skips (Self-SD)."""

from __future__ import annotations

from typing import NamedTuple


class SkippedSublayers(NamedTuple):
    """Numbers of the layers, from 0, whose attention or MLP is skipped, so that only the residual passes."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @property
    def in_order(self) -> dict[str, list[int]]:
        """Make the JSON form, sorted."""
        return {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}


NOTHING = SkippedSublayers(frozenset(), frozenset())
