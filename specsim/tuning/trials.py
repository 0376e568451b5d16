"""What a search has found so far; it outlives an interrupt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specsim.progress import Counter, no_progress
from specsim.tuning.evaluate import Evaluator
from specsim.tuning.journal import Journal
from specsim.tuning.space import Settings


@dataclass
class SearchState:
    """Points tried, in order.

    ranking : indices of points, best first as far as is known; without those refused
    replayed_rows : positions replayed, all points together
    """

    points: list[Settings] = field(default_factory=list)
    ranking: list[int] = field(default_factory=list)
    replayed_rows: int = 0


@dataclass(frozen=True)
class SearchContext:
    """What every search is given."""

    evaluator: Evaluator
    journal: Journal
    trials: SearchState
    progress: Counter = no_progress

    def totals(self, points: Sequence[Settings]) -> list[float | None]:
        """Speculative seconds of each point on the whole trace; None where it is refused."""
        built = self.evaluator.build(points)
        policies = [policy for policy in built if not isinstance(policy, Exception)]
        seconds = iter(self.evaluator.seconds(policies).sum(axis=1).tolist())
        found = [math.inf if isinstance(policy, Exception) else next(seconds) for policy in built]
        return [total if math.isfinite(total) else None for total in found]

    @property
    def rows(self) -> int:
        """Positions that one point replays on the whole trace."""
        return len(self.evaluator.trace.token)


def ranked(totals: Sequence[float | None]) -> list[int]:
    """Indices from the fewest seconds to the most, the first of equals first, without those refused."""
    known = [(seconds, i) for i, seconds in enumerate(totals) if seconds is not None]
    return [i for _, i in sorted(known)]
