"""Costs of batches that the tests of serving share, and their cost table without rounding of contexts."""

from __future__ import annotations

from typing import Any

import numpy as np

from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.table import CostTable, compile_table, context_range
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
