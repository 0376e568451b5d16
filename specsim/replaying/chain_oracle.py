"""The oracle: the least seconds in which any chain policy could have decoded a trace.

An exact dynamic programme over positions. The oracle knows every match length and drafts
0..draft_limit tokens wherever a round starts, free of policy steps. Rounds cost what replay
charges: draft steps and verification at the bucket of the round's context, and the round's
overhead. A round without a draft, which no policy here chooses, leaves the draft cache a
token short, so the next draft starts with a step that ingests two; a longer lag is charged
as two as well, the most that a table prices. Where the drafter had nothing to propose, as prompt
lookup at times, nothing lags. All that a policy can do is among the oracle's
choices at the same price, so no policy's replay under the same table takes less. A policy that drops a
token pays a draft step and is spared catching up, which is taken to cost no more.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from specsim.cost.contexts import context_range
from specsim.cost.table import CostTable
from specsim.io.arrays import Floats, IntArray, Seconds
from specsim.io.errors import InputError
from specsim.replaying.kernel import select_fields
from specsim.trace.outcomes import outcomes
from specsim.trace.trace import Trace


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
    round_overhead_s: float


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _least_seconds(  # type: ignore[no-untyped-def]
    trace, match_len, costs, seconds
):
    """Compute, backward over the positions of each sequence, the least seconds from there to its end.

    seconds [S]. `behind` is 1 if the draft cache lacks a token.
    """
    offsets, prompt_tokens, draft_limit = trace.offsets, trace.prompt_tokens, trace.draft_limit
    draft_s, catch_up_s, verify_s = costs.draft_s, costs.catch_up_s, costs.verify_s
    remaining = np.zeros((np.diff(offsets).max() + 1, 2))  # [t, behind]
    for s in range(len(prompt_tokens)):
        start, end = offsets[s], offsets[s + 1]
        length = end - start
        remaining[length] = 0.0
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
                best = min(best, total)
            for behind in range(2):
                drafting = best + behind * catch_up_s[bucket]
                remaining[t, behind] = min(none, drafting) + costs.round_overhead_s
        seconds[s] = remaining[0, 0]


def _solve(trace: Trace, match_len: IntArray, table: CostTable) -> Floats:
    sizes, columns = table.verify_s.shape
    longest = context_range(trace)[1]
    if sizes < trace.depth + 2 or columns <= longest >> table.bucket_bits:
        raise InputError(
            f"cost table covers verification of up to {sizes - 1} tokens and contexts below "
            f"{columns << table.bucket_bits}, the oracle needs {trace.depth + 1} and {longest}; "
            "compile it for this trace"
        )
    seconds = np.zeros(trace.sequences)
    _least_seconds(select_fields(OracleTrace, trace), match_len, select_fields(OracleCosts, table), seconds)
    return seconds


def chain_oracle_seconds(trace: Trace, table: CostTable, *, seed: int = 0) -> Floats:
    """Compute the least seconds per sequence [S] of any chain policy on this trace.

    On a trace of rejection sampling this is the sum over the outcomes that a replay with the
    same seed sums over. Raises InputError if the table does not cover the trace's depth and
    contexts.
    """
    return np.sum([_solve(trace, match_len, table) for match_len, _ in outcomes(trace, seed)], axis=0)
