"""Costs of batches that the tests of serving share, and their cost table without rounding of contexts."""

from __future__ import annotations

from typing import Any

import numpy as np

from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.model import ConstantCost
from specsim.cost.table import CostTable, compile_table, context_range
from specsim.policy.base import Policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.serving.lockstep import BatchRounds
from specsim.trace.trace import Trace

COST = LinearCost(LinearPass(0.01, 3e-4, 2e-6), LinearPass(0.002, 1e-4, 5e-7), step_s=0.001, round_s=0.0005)


class _OneTokenBuckets(LinearCost):
    """A linear cost asked at the middle of buckets of a single token, half a token beyond the token itself."""

    def verify(self, n_tokens: int, context: Any) -> Any:
        return super().verify(n_tokens, np.asarray(context) - 0.5)

    def tree_verify(self, n_tokens: int, context: Any) -> Any:
        return super().tree_verify(n_tokens, np.asarray(context) - 0.5)

    def draft(self, n_tokens: int, context: Any) -> Any:
        return super().draft(n_tokens, np.asarray(context) - 0.5)


def exact_table(trace: Trace, cost: LinearCost, *, trees: bool = False) -> CostTable:
    """The cost table without rounding of contexts."""
    least, most = context_range(trace)
    contexts = (least, most + 1)
    model = _OneTokenBuckets(**vars(cost))
    return compile_table(model, max_draft_tokens=trace.depth, contexts=contexts, trees=trees, bucket_bits=0)


def assert_rounds_are_those_of_each_sequence_alone(rounds: BatchRounds, trace: Trace, policy: Policy) -> None:
    """A sequence drafts in a batch what it drafts in a replay of its own."""
    for s in range(trace.sequences):
        alone = trace.select([s])
        log = replay(alone, policy, cost_table(alone, ConstantCost(1e-3, 1e-2)), log=True).rounds
        assert log is not None
        own = rounds.sequence == s
        for name in ("t", "drafted", "accepted"):
            assert getattr(rounds, name)[own].tolist() == getattr(log, name).tolist()
