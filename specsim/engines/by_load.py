"""Speedup by number of requests at once, of an advice whose costs know batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from specsim.cost.files import with_batch
from specsim.cost.linear import LinearCost
from specsim.cost.model import CostModel
from specsim.io.arrays import Floats
from specsim.io.errors import InputError

BATCHES = (
    *range(1, 8),
    *(part * 2**power for power in range(1, 8) for part in (4, 5, 6, 7)),
    1024,
)  # concurrent requests


class ByLoad(NamedTuple):
    """Speedups by number of requests at once, both sides of every change of the best K included.

    batches : [B], increasing from 1; speedups : [B], by K as text
    """

    batches: list[int]
    speedups: dict[str, list[float]]


def speedups_by_load(cost: CostModel, speedups_at: Callable[[CostModel], Floats]) -> ByLoad | None:
    """Speedup of every K with other numbers of requests at once, up to what fits into memory or costs cover.

    Acceptance is taken not to depend on the load.

    speedups_at : speedups [D + 1] of K = 0, 1, ... with costs of some batch

    Returns None for costs of a single batch.
    """
    found: dict[int, Floats] = {}
    most = BATCHES[-1]
    if isinstance(cost, LinearCost):
        most = cost.fitted.batches[1] if cost.fitted is not None else 0

    def best(batch: int) -> int:
        if batch not in found:
            found[batch] = speedups_at(with_batch(cost, batch))
        return int(found[batch].argmax())

    for batch in BATCHES:
        try:
            if batch <= most:
                best(batch)
        except InputError:
            break
    kept = {*found}
    for low, end in pairwise([*found]):
        while best(low) != best(end) and end - low > 1:
            before, after = low, end  # between which the best K of `low` ceases to be the best
            while after - before > 1:
                middle = (before + after) // 2
                before, after = (middle, after) if best(middle) == best(low) else (before, middle)
            kept |= {before, after}
            low = after
    batches = sorted(kept)
    if len(batches) < 2:
        return None
    by_k = np.array([found[batch] for batch in batches]).T
    return ByLoad(batches, {str(k): values.tolist() for k, values in enumerate(by_k)})
