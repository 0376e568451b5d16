"""Boards of several traces as one ranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsim.ranking.leaderboard import Board


@dataclass(frozen=True)
class Standing:
    """One form of a policy over several traces: geometric mean of its speedups, and its rank on each."""

    label: str
    speedup: float
    ranks: list[int]

    @property
    def mean_rank(self) -> float:
        return sum(self.ranks) / len(self.ranks)


def combined(boards: Sequence[Board]) -> list[Standing]:
    """Standings over boards of several traces, best geometric mean first; only what ran on all of them."""
    ranks = [{row.label: place for place, row in enumerate(board.rows, start=1)} for board in boards]
    speedups = [{row.label: row.speedup.estimate for row in board.rows} for board in boards]
    everywhere = [name for name in ranks[0] if all(name in board for board in ranks)]
    standings = [
        Standing(
            name,
            math.exp(sum(math.log(board[name]) for board in speedups) / len(boards)),
            [board[name] for board in ranks],
        )
        for name in everywhere
    ]
    return sorted(standings, key=lambda standing: -standing.speedup)
