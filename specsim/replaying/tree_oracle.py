"""The tree oracle: the least seconds in which any tree policy could have decoded a trace.

An exact dynamic programme over positions, as that of chains (`specsim.replaying.chain_oracle`). The oracle knows
the true path. It drafts and verifies true nodes alone, in any depth to which all ranks of the
true path are below a width, and free of policy steps; or it drafts nothing. Rounds cost what
replay charges at the bucket of the round's context. A draft pass over several nodes, or a pass
over more tokens, is charged less only where the table says so. Drafting a level more than is
verified leaves no catching up to the next round, so that is among the choices too.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from specsim.cost.contexts import context_range
from specsim.cost.table import CostTable
from specsim.io.arrays import Floats, IntArray, Seconds
from specsim.io.errors import InputError
from specsim.replaying.chain_oracle import OracleCosts
from specsim.replaying.kernel import select_fields
from specsim.trace.trace import Trace


def reachable_depth(trace: Trace, width: int | None = None) -> IntArray:
    """Return the depth [N] to which all ranks of the true path are below a width (default: the recorded trees').

    Without recorded trees and a width, any rank will do. Raises InputError where the trace holds no ranks.
    """
    if trace.true_rank is None:
        raise InputError("the tree oracle needs the column 'true_rank', which this trace lacks; record it")
    if width is None:
        width = int(trace.true_rank.max()) + 1 if trace.tree is None else trace.tree.width
    right = (trace.true_rank >= 0) & (trace.true_rank < width)
    return np.where(right.all(axis=1), trace.depth, right.argmin(axis=1))


class TreeOracleTrace(NamedTuple):
    """What the oracle of trees reads of a trace; see `Trace`."""

    offsets: IntArray
    prompt_tokens: IntArray
    budget_tokens: IntArray


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _least_seconds(  # type: ignore[no-untyped-def]
    trace, reach, costs, seconds
):
    """Compute, backward over the positions of each sequence, the least seconds [S] to its end.

    costs : draft_s [D + 1, B] and verify_s [D + 2, B] are the least seconds of that many tokens or more
    """
    offsets, prompt_tokens, budget_tokens = trace
    draft_s, catch_up_s, verify_s = costs.draft_s, costs.catch_up_s, costs.verify_s
    depth = len(draft_s) - 1
    remaining = np.zeros((np.diff(offsets).max() + 1, 2))  # [t, whether the draft cache lacks a token]
    for s in range(len(prompt_tokens)):
        length = offsets[s + 1] - offsets[s]
        remaining[length] = 0.0
        for t in range(length - 1, -1, -1):
            bucket = (prompt_tokens[s] + t - 1) >> costs.bucket_bits
            limit = min(depth, budget_tokens[s] - t - 1)
            right = min(np.int64(reach[offsets[s] + t]), limit)
            deeper = np.inf  # the cheapest draft of more levels than `accepted`
            for k in range(right + 1, limit + 1):
                deeper = min(deeper, draft_s[k, bucket])
            best = np.inf  # of the rounds that draft, less catching up
            for accepted in range(right, -1, -1):
                after, pass_s = min(t + accepted + 1, length), verify_s[accepted + 1, bucket]
                best = min(best, deeper + pass_s + remaining[after, 0])
                if accepted > 0:
                    best = min(best, draft_s[accepted, bucket] + pass_s + remaining[after, 1])
                    deeper = min(deeper, draft_s[accepted, bucket])
            none = verify_s[1, bucket] + remaining[t + 1, 1]
            remaining[t, 0] = min(none, best) + costs.round_overhead_s
            remaining[t, 1] = min(none, best + catch_up_s[bucket]) + costs.round_overhead_s
        seconds[s] = remaining[0, 0]


def tree_oracle_seconds(trace: Trace, table: CostTable, width: int | None = None) -> Floats:
    """Compute the least seconds per sequence [S] of any tree policy with up to `width` children per node.

    width : as in `reachable_depth`; a static tree may be wider than the recorded ones

    Raises InputError on a trace of rejection sampling, and where the table does not cover the
    trace's depth and contexts.
    """
    if trace.sampled_by_rejection:
        raise InputError(
            "trees are replayed on greedy and Gumbel traces only; this trace was recorded with rejection sampling"
        )
    reach = reachable_depth(trace, width)
    if table.tree is None:
        raise InputError("the tree oracle needs costs of trees; profile with `realrun profile --tree-nodes`")
    sizes, columns = table.tree.verify_s.shape
    longest = context_range(trace)[1]
    if sizes < trace.depth + 2 or len(table.draft_s) <= trace.depth or columns <= longest >> table.bucket_bits:
        raise InputError(
            f"costs cover trees of up to {sizes - 1} tokens, drafts of up to {len(table.draft_s) - 1} and contexts "
            f"below {columns << table.bucket_bits}, the tree oracle needs {trace.depth + 1}, {trace.depth} and "
            f"{longest}; compile them for this trace"
        )
    levels = np.arange(trace.depth + 1)[:, None]
    seconds = np.zeros(trace.sequences)
    costs = select_fields(
        OracleCosts,
        table,
        table.tree,
        draft_s=table.draft_s[: trace.depth + 1] + levels * _at_least(table.tree.wider_s)[1],
        verify_s=_at_least(table.tree.verify_s)[: trace.depth + 2],
    )
    _least_seconds(select_fields(TreeOracleTrace, trace), reach, costs, seconds)
    return seconds


def _at_least(cost_s: Seconds) -> Seconds:
    """Return the least cost of that many rows or more, because measured costs may fall somewhere."""
    return np.ascontiguousarray(np.minimum.accumulate(cost_s[::-1])[::-1])
