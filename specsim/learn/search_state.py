"""State of a search: the points tried so far and their ranking. It outlives an interrupt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from specsim.io.errors import InputError
from specsim.io.json import checked
from specsim.io.progress import Counter, no_progress
from specsim.learn.evaluate import Evaluator
from specsim.learn.journal import Journal, Line
from specsim.learn.space import Settings


class Batch(TypedDict):
    """A journal's line: seconds of each point, or of its sequences; null where the point is refused."""

    seconds: list[float | list[float] | None]


class PointBatch(Batch):
    """A journal's line that holds the points too."""

    points: list[dict[str, Any]]


@dataclass
class SearchState:
    """Points that a search has tried, in order.

    ranking : indices of points, the best known first; without those refused
    replayed_rows : positions replayed, all points together
    """

    evaluator: Evaluator
    journal: Journal
    progress: Counter = no_progress
    points: list[Settings] = field(default_factory=list)
    ranking: list[int] = field(default_factory=list)
    replayed_rows: int = 0

    @property
    def rows(self) -> int:
        """Positions replayed for a point on the whole trace."""
        return len(self.evaluator.trace.token)

    def refused_points(self) -> list[Settings]:
        """Points that are not ranked."""
        return [point for i, point in enumerate(self.points) if i not in set(self.ranking)]

    def batch(self, evaluate: Callable[[], Line], size: int, schema: type = Batch) -> Line:
        """The next batch of `size` points: from the journal, or evaluated now and written there."""
        damaged, hint = "a line of the search's journal", "delete the journal to search anew"
        line: Line = checked(self.journal.batch(evaluate), damaged, schema, invalid=hint)
        if {len(line[part]) for part in schema.__annotations__} != {size}:
            raise InputError(f"{damaged} is not of {size} points; {hint}")
        return line

    def replay_in_full(
        self,
        count: int,
        batch_size: int,
        propose: Callable[[int, int], list[Settings]],
        observe: Callable[[Line], None] | None = None,
    ) -> None:
        """Replay `count` points on every sequence, in batches.

        propose : the next points, by how many are done and how many to add; not asked where the journal has them
        observe : called with every batch, from the journal or new
        """
        totals: list[float | None] = []
        while len(totals) < count:
            done, size = len(totals), min(batch_size, count - len(totals))

            def evaluate(done: int = done, size: int = size) -> Line:
                points = propose(done, size)
                return {"points": points, "seconds": self.total_seconds(points)}

            line = self.batch(evaluate, size, PointBatch)
            if observe:
                observe(line)
            totals += line["seconds"]
            self.points += line["points"]
            self.ranking = ranked(totals)
            self.replayed_rows += self.rows * size
            self.progress(len(totals), count)

    def total_seconds(self, points: Sequence[Settings]) -> list[float | None]:
        """Speculative seconds of each point on the whole trace; None where it is refused."""
        built = self.evaluator.build(points)
        policies = [policy for policy in built if not isinstance(policy, Exception)]
        seconds = iter(self.evaluator.seconds(policies).sum(axis=1).tolist())
        totals = [math.inf if isinstance(policy, Exception) else next(seconds) for policy in built]
        return [total if math.isfinite(total) else None for total in totals]


def ranked(totals: Sequence[float | None]) -> list[int]:
    """Indices from the fewest seconds to the most, the first of equals first, without those refused."""
    known = [(seconds, i) for i, seconds in enumerate(totals) if seconds is not None]
    return [i for _, i in sorted(known)]
