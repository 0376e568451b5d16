"""The oracle of a joined trace: a bound on what any choice of drafters and draft lengths could gain.

A dynamic programme over positions, as in `specsim.replaying.chain_oracle`. The oracle knows every match
length, drafts with any drafter wherever a round starts, or not at all, and pays neither for deciding nor for catching
up. Since catching up costs time, no policy takes less, whether it switches or uses a single drafter.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from specsim.cost.joined import JoinedTable
from specsim.io.arrays import Floats
from specsim.replaying.switch import switch_costs, switch_trace
from specsim.trace.joined import JoinedTrace


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _least_seconds(  # type: ignore[no-untyped-def]
    trace, costs, seconds
):
    """Compute, backward over the positions of each sequence, the least seconds [S] from its start to its end."""
    offsets, prompt_tokens, match_len, draft_limit = (
        trace.offsets,
        trace.prompt_tokens,
        trace.match_len,
        trace.draft_limit,
    )
    draft_s, verify_s = costs.draft_s, costs.verify_s
    remaining = np.zeros(np.diff(offsets).max() + 1)
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
                    best = min(best, total)
            remaining[t] = best
        seconds[s] = remaining[0]


def switch_oracle_seconds(trace: JoinedTrace, table: JoinedTable) -> Floats:
    """Compute a lower bound [S] on the seconds in which any policy decodes each sequence of this joined trace."""
    seconds = np.zeros(trace.sequences)
    _least_seconds(switch_trace(trace), switch_costs(table), seconds)
    return seconds
