"""Brute force: every point on the whole trace."""

from __future__ import annotations

from collections.abc import Sequence

from specsim.tuning.evaluate import BATCH
from specsim.tuning.journal import Line
from specsim.tuning.space import Settings
from specsim.tuning.trials import SearchContext, ranked


def grid_search(task: SearchContext, points: Sequence[Settings]) -> None:
    """Replay every point on every sequence."""
    totals: list[float | None] = []
    for start in range(0, len(points), BATCH):
        batch = points[start : start + BATCH]

        def find(batch: Sequence[Settings] = batch) -> Line:
            return {"seconds": task.totals(batch)}

        totals += task.batch(find, len(batch))["seconds"]
        task.trials.points += batch
        task.trials.ranking = ranked(totals)
        task.trials.replayed_rows += task.rows * len(batch)
        task.progress(len(totals), len(points))
