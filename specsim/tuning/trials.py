"""What a search has found so far; it outlives an interrupt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from specsim.errors import InputError
from specsim.json_files import checked
from specsim.progress import Counter, no_progress
from specsim.tuning.evaluate import Evaluator
from specsim.tuning.journal import Journal, Line
from specsim.tuning.space import Settings


class Batch(TypedDict):
    """A journal's line: seconds of each point, or of its sequences, null where it is refused; the points themselves."""

    seconds: list[float | list[float] | None]
    points: NotRequired[list[dict[str, Any]]]


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

    def batch(self, find: Callable[[], Line], count: int) -> Line:
        """The next batch of so many points: from the journal, or found now and kept there."""
        damaged, anew = "a line of the search's journal", "delete the journal to search anew"
        line: Line = checked(self.journal.batch(find), damaged, Batch, invalid=anew)
        if {len(line[part]) for part in ("seconds", "points") if part in line} != {count}:
            raise InputError(f"{damaged} is not of {count} points; {anew}")
        return line

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
