"""Which attention and MLP sublayers of a model a draft passes over (Self-SD)."""

from __future__ import annotations

from typing import NamedTuple


class SkippedSublayers(NamedTuple):
    """Numbers of the layers, from 0, whose attention and whose MLP is skipped: the residual alone goes on."""

    attention: frozenset[int]
    mlp: frozenset[int]

    @property
    def in_order(self) -> dict[str, list[int]]:
        """The JSON form."""
        return {"attention": sorted(self.attention), "mlp": sorted(self.mlp)}


NOTHING = SkippedSublayers(frozenset(), frozenset())
