"""What passes over a batch hold, in which every sequence has its own context and its own draft, and who prices them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from specsim.arrays import Bools, Floats, Ints, Seconds


class BatchTokens(NamedTuple):
    """What passes hold, summed over their sequences: arrays [Q] of Q passes, or numbers of one.

    sequences : that take part, at least 1
    new : new tokens
    cached : tokens in the caches before the pass
    pairs : of a new token and one that it is weighed against, cached or new: n (c + n) of each sequence
    """

    sequences: Floats
    new: Floats
    cached: Floats
    pairs: Floats

    @classmethod
    def alike(cls, sequences: npt.ArrayLike, new: npt.ArrayLike, cached: npt.ArrayLike) -> BatchTokens:
        """Of sequences with so many new and cached tokens each."""
        count, n, c = np.broadcast_arrays(*(np.asarray(value, np.float64) for value in (sequences, new, cached)))
        return cls(count, count * n, count * c, count * n * (c + n))

    @classmethod
    def of(cls, new: Ints, cached: Ints) -> BatchTokens:
        """Of one pass over sequences with these new and cached tokens [R]."""
        sums = (len(new), new.sum(), cached.sum(), (new * (cached + new)).sum())
        return cls(*np.array(sums, dtype=np.float64))

    def select(self, passes: Bools) -> BatchTokens:
        """Some of the passes."""
        return BatchTokens(*(each[passes] for each in self))


@runtime_checkable
class BatchCost(Protocol):
    """A cost model that knows batches of mixed contexts."""

    @property
    def step_s(self) -> float:
        """Seconds of an engine step beside its passes."""

    @property
    def round_s(self) -> float:
        """Seconds that a step with speculation takes beyond that."""

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        """The draft step at this place of a round, from 0, of those who still draft."""

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        """One pass of the target over all pending and drafted tokens."""
