"""Oracles: the least seconds in which any policy of a kind could have decoded a trace.

Each is an exact dynamic programme over positions. The oracle of chains knows every match length and drafts
0..draft_limit tokens wherever a round starts, free of policy steps. Rounds cost what replay
charges: draft steps and verification at the bucket of the round's context, and the round's
overhead. A round without a draft, which no policy here chooses, leaves the draft cache a
token short, so the next draft starts with a step that ingests two; a longer lag is charged
as two as well, the most that a table prices. Where the drafter had nothing to propose, as prompt
lookup at times, nothing lags. All that a policy can do is among the oracle's
choices at the same price, so no policy's replay under the same table takes less. A policy that drops a
token pays a draft step and is spared catching up, which is taken to cost no more.

The oracle of trees knows the true path. It drafts and verifies true nodes alone, in any depth to which all ranks of
the true path are below a width; or it drafts nothing. A draft pass over several nodes, or a pass over more tokens, is
charged less only where the table says so. Drafting a level more than is verified leaves no catching up to the next
round, so that is among the choices too.

The oracle of a joined trace drafts with any drafter wherever a round starts, or not at all, and pays neither for
deciding nor for catching up. Since catching up costs time, no policy takes less, whether it switches or uses a single
drafter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specsim.cost.joined import JoinedTable
from specsim.cost.table import CostTable, context_range
from specsim.io.arrays import Floats, IntArray, Seconds
from specsim.io.compiled import njit
from specsim.io.errors import InputError
from specsim.replaying.kernel import select_fields
from specsim.replaying.switch import switch_costs, switch_trace
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace
from specsim.trace.tree_record import longest_plausible


class OracleTrace(NamedTuple):
    """What the oracle of chains reads of a trace; see `Trace`."""

    offsets: IntArray
    prompt_tokens: IntArray
    draft_limit: IntArray


class OracleCosts(NamedTuple):
    """What the oracle of chains reads of a cost table; see `CostTable`."""

    bucket_bits: int
    draft_s: Seconds
    catch_up_s: Seconds
    verify_s: Seconds
    refeed_s: Seconds
    round_overhead_s: float


@njit(nogil=True, error_model="numpy")
def _chain_seconds(  # type: ignore[no-untyped-def]
    trace, match_len, costs, remaining, seconds
):
    """Compute, backward over the positions of each sequence, the least seconds from there to its end.

    remaining [t, behind], seconds [S]. `behind` is 1 if the draft cache lacks a token.
    """
    offsets, prompt_tokens, draft_limit = trace.offsets, trace.prompt_tokens, trace.draft_limit
    draft_s, catch_up_s, verify_s = costs.draft_s, costs.catch_up_s, costs.verify_s
    for s in range(len(prompt_tokens)):
        start, end = offsets[s], offsets[s + 1]
        length = end - start
        remaining[length, 0] = remaining[length, 1] = 0.0
        for t in range(length - 1, -1, -1):
            row = start + t
            bucket = (prompt_tokens[s] + t - 1) >> costs.bucket_bits
            right, limit = np.int64(match_len[row]), np.int64(draft_limit[row])
            none = verify_s[1, bucket] + remaining[t + 1, 1 if limit > 0 else 0]
            best = np.inf  # of the rounds that draft, without catching up
            for k in range(1, limit + 1):
                accepted = k if k < right else right
                after = min(t + accepted + 1, length)
                then = remaining[after, 1] if accepted == k else remaining[after, 0]
                total = draft_s[k, bucket] + verify_s[k + 1, bucket] + then
                if accepted < k and after < length:
                    total += costs.refeed_s[accepted + 1, bucket]
                best = min(best, total)
            for behind in range(2):
                drafting = best + behind * catch_up_s[bucket]
                remaining[t, behind] = min(none, drafting) + costs.round_overhead_s
        seconds[s] = remaining[0, 0]


def chain_oracle_seconds(trace: Trace, table: CostTable) -> Floats:
    """Compute the least seconds per sequence [S] of any chain policy on this trace.

    Raises InputError if the table does not cover the trace's depth and contexts.
    """
    sizes, columns = table.verify_s.shape
    longest = context_range(trace)[1]
    if sizes < trace.depth + 2 or columns <= longest >> table.bucket_bits:
        raise InputError(
            f"cost table covers verification of up to {sizes - 1} tokens and contexts below "
            f"{columns << table.bucket_bits}, the oracle needs {trace.depth + 1} and {longest}; "
            "compile it for this trace"
        )
    remaining, seconds = np.zeros((trace.output_tokens.max() + 1, 2)), np.zeros(trace.sequences)
    costs = select_fields(OracleCosts, table)
    _chain_seconds(select_fields(OracleTrace, trace), trace.match_len, costs, remaining, seconds)
    return seconds


def reachable_depth(trace: Trace, width: int | None = None) -> IntArray:
    """Return the depth [N] to which all ranks of the true path are below a width (default: the recorded trees').

    Without recorded trees and a width, any rank will do. Under typical acceptance it is the depth of the longest path
    of accepted nodes. Raises InputError where the trace holds no ranks.
    """
    if trace.tree is not None and trace.tree.plausible is not None:
        return longest_plausible(trace.tree)
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


@njit(nogil=True, error_model="numpy")
def _tree_seconds(  # type: ignore[no-untyped-def]
    trace, reach, costs, remaining, seconds
):
    """Compute, backward over the positions of each sequence, the least seconds [S] to its end.

    remaining : [t, whether the draft cache lacks a token]
    costs : draft_s [D + 1, B] and verify_s [D + 2, B] are the least seconds of that many tokens or more
    """
    offsets, prompt_tokens, budget_tokens = trace
    draft_s, catch_up_s, verify_s = costs.draft_s, costs.catch_up_s, costs.verify_s
    depth = len(draft_s) - 1
    for s in range(len(prompt_tokens)):
        length = offsets[s + 1] - offsets[s]
        remaining[length, 0] = remaining[length, 1] = 0.0
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
        raise InputError("trees are not replayed on a trace of rejection sampling; record with --mode greedy-draft")
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
    remaining, seconds = np.zeros((trace.output_tokens.max() + 1, 2)), np.zeros(trace.sequences)
    costs = select_fields(
        OracleCosts,
        table,
        table.tree,
        draft_s=table.draft_s[: trace.depth + 1] + levels * _at_least(table.tree.wider_s)[1],
        verify_s=_at_least(table.tree.verify_s)[: trace.depth + 2],
    )
    _tree_seconds(select_fields(TreeOracleTrace, trace), reach, costs, remaining, seconds)
    return seconds


def _at_least(cost_s: Seconds) -> Seconds:
    """Return the least cost of that many rows or more, because measured costs may fall somewhere."""
    return np.ascontiguousarray(np.minimum.accumulate(cost_s[::-1])[::-1])


@njit(nogil=True, error_model="numpy")
def _switch_seconds(  # type: ignore[no-untyped-def]
    trace, costs, remaining, seconds
):
    """Compute, backward over the positions of each sequence, the least seconds [S] from its start to its end."""
    offsets, prompt_tokens, match_len, draft_limit = (
        trace.offsets,
        trace.prompt_tokens,
        trace.match_len,
        trace.draft_limit,
    )
    draft_s, verify_s = costs.draft_s, costs.verify_s
    for s in range(len(prompt_tokens)):
        start, length = offsets[s], offsets[s + 1] - offsets[s]
        remaining[length] = 0.0
        for t in range(length - 1, -1, -1):
            row, bucket = start + t, (prompt_tokens[s] + t - 1) >> costs.bucket_bits
            best = np.inf
            for d in range(len(draft_s)):
                right, limit = np.int64(match_len[d, row]), np.int64(draft_limit[d, row])
                for k in range(limit + 1):
                    accepted = k if k < right else right
                    after = remaining[min(t + accepted + 1, length)]
                    total = draft_s[d, k, bucket] + verify_s[d, k + 1, bucket] + costs.round_overhead_s[d] + after
                    if accepted < k and t + accepted + 1 < length:
                        total += costs.refeed_s[d, accepted + 1, bucket]
                    best = min(best, total)
            remaining[t] = best
        seconds[s] = remaining[0]


def switch_oracle_seconds(trace: JoinedTrace, table: JoinedTable) -> Floats:
    """Compute a lower bound [S] on the seconds in which any policy decodes each sequence of this joined trace."""
    remaining, seconds = np.zeros(trace.output_tokens.max() + 1), np.zeros(trace.sequences)
    _switch_seconds(switch_trace(trace), switch_costs(table), remaining, seconds)
    return seconds
