"""Speedup by number of requests at once, of an advice whose costs know batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specsim.cost.batches import DoesNotFit
from specsim.cost.files import with_batch
from specsim.cost.model import CostModel
from specsim.io.errors import InputError

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class ByLoad(NamedTuple):
    """Speedups by number of requests at once. batches : [B]; speedups : [B], by K as text"""

    batches: list[int]
    speedups: dict[str, list[float]]


def speedups_by_load(speedups: Sequence[float], cost: CostModel, context: int) -> ByLoad | None:
    """Speedup of every K with other numbers of requests at once, up to what fits into memory.

    Acceptance is taken not to depend on the load, so that only the costs of a round and of a decoding step change.

    speedups : of K = 0, 1, ..., with these costs

    Returns None for costs without batches.
    """

    def per_round(model: CostModel) -> list[float]:
        """A decoding step over a round, for every K."""
        step_s = float(model.round_seconds(0, context))
        return [step_s / float(model.round_seconds(k, context)) for k in range(len(speedups))]

    here, batches = per_round(cost), []
    by_k: dict[str, list[float]] = {str(k): [] for k in range(len(speedups))}
    for batch in BATCHES:
        try:
            there = per_round(with_batch(cost, batch))
        except DoesNotFit:
            break
        except InputError:  # costs of one batch
            return None
        batches.append(batch)
        for k, values in enumerate(by_k.values()):
            values.append(speedups[k] * there[k] / here[k])
    return ByLoad(batches, by_k) if batches else None
