"""What passes over a batch hold, in which every sequence has its own context and its own draft, and who prices them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from specsim.arrays import Bools, Floats, Ints, Seconds
from specsim.cost.model import CostModel


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

    @property
    def max_tree_tokens(self) -> int:
        """Most tokens of a sequence's tree that are priced; 0: no trees."""

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        """The draft step at this place of a round, from 0, of those who still draft."""

    def batch_wider(self, nodes: BatchTokens, one: BatchTokens) -> Seconds:
        """What a draft pass over nodes of trees takes beyond a chain's, over one token of each sequence."""

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        """One pass of the target over all pending and drafted tokens."""

    def batch_tree_verify(self, tokens: BatchTokens) -> Seconds:
        """One over trees, and compaction of the cache."""


class BatchCostModel(CostModel):
    """A cost model made of what batches cost: `batch` sequences in lockstep, all of the same context."""

    @property
    def batch(self) -> int:
        return 1

    @property
    def step_s(self) -> float:
        return 0.0

    @property
    def round_s(self) -> float:
        return 0.0

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        raise NotImplementedError

    def batch_wider(self, nodes: BatchTokens, one: BatchTokens) -> Seconds:
        # as measured, a pass over more tokens may be a little faster
        return np.maximum(self.batch_draft(0, nodes) - self.batch_draft(0, one), 0.0)

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        raise NotImplementedError

    def batch_tree_verify(self, tokens: BatchTokens) -> Seconds:
        return self.batch_verify(tokens)

    def draft_step(self, place: int, context: npt.ArrayLike) -> Seconds:
        """The draft step at this place of a round, from 0, in a round that starts at `context`."""
        return self.batch_draft(place, BatchTokens.alike(self.batch, 1, np.asarray(context) + place))

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.asarray(np.sum([self.draft_step(place, context) for place in range(n_tokens)], axis=0))

    def catch_up(self, context: npt.ArrayLike) -> Seconds:
        return self.wider(2, context)

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        return self.batch_wider(*(BatchTokens.alike(self.batch, nodes, context) for nodes in (n_nodes, 1)))

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.batch_verify(BatchTokens.alike(self.batch, n_tokens, context))

    def tree_verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.batch_tree_verify(BatchTokens.alike(self.batch, n_tokens, context))

    def round_overhead(self) -> float:
        return self.step_s + self.round_s

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.verify(1, context) + self.step_s
