"""The replay kernel of static trees, which need no recorded nodes."""

from __future__ import annotations

import numba as nb
import numpy as np

from specsim.arrays import Array
from specsim.policy.tree.static import expanded_per_level
from specsim.replaying.chain import (
    ACCEPTED,
    DRAFT_S,
    DRAFTED,
    OTHER_S,
    POLICY_S,
    POLICY_STEPS,
    ROUNDS,
    VERIFIED,
    VERIFY_S,
)


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _replay_static(  # type: ignore[no-untyped-def]
    children,
    first_child,
    level_end,
    expanded,
    which,
    offsets,
    prompt_tokens,
    budget_tokens,
    true_rank,
    bucket_bits,
    draft_s,
    catch_up_s,
    wider_s,
    verify_s,
    policy_step_s,
    round_overhead_s,
    counts,
    seconds,
    log,
):
    """The loop of one static tree. level_end [L + 1]: nodes up to each depth; expanded [L]: nodes expanded at each."""
    log_row = 0
    deepest = len(level_end) - 1
    for i, s in enumerate(which):
        start, end = offsets[s], offsets[s + 1]
        base_context = prompt_tokens[s] - start - 1
        t = start
        behind = 0
        while t < end:
            bucket = (base_context + t) >> bucket_bits
            limit = min(deepest, budget_tokens[s] - (t - start) - 1)
            drafted = level_end[limit] - 1
            accepted = node = 0
            while accepted < limit:
                rank = np.int64(true_rank[t, accepted])
                if rank < 0 or rank >= children[node]:
                    break
                node = first_child[node] + rank
                accepted += 1
            if limit > 0:
                seconds[i, DRAFT_S] += draft_s[limit, bucket] + behind * catch_up_s[bucket]
                for level in range(limit):
                    seconds[i, DRAFT_S] += wider_s[expanded[level], bucket]
                behind = 1 if accepted > 0 and (accepted == limit or children[node] == 0) else 0
            counts[i, ROUNDS] += 1
            counts[i, DRAFTED] += drafted
            counts[i, ACCEPTED] += accepted
            counts[i, POLICY_STEPS] += limit
            counts[i, VERIFIED] += drafted
            seconds[i, POLICY_S] += limit * policy_step_s
            seconds[i, VERIFY_S] += verify_s[drafted + 1, bucket]
            seconds[i, OTHER_S] += round_overhead_s
            if len(log.t) > 0:
                log.sequence[log_row] = s
                log.t[log_row] = t - start
                log.drafted[log_row] = log.verified[log_row] = drafted
                log.accepted[log_row] = accepted
                log.last[log_row] = node
                log_row += 1
            t += accepted + 1
    return log_row


def _links(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """children, first_child, level_end, expanded of `_replay_static`."""
    children = np.array(shape, dtype=np.int64)
    first = 1 + np.concatenate([[0], np.cumsum(children)[:-1]])
    ends, end = [1], 1
    while True:
        begin = 0 if len(ends) == 1 else ends[-2]
        size = int(children[begin:end].sum())
        if not size:
            break
        end += size
        ends.append(end)
    return children, first, np.array(ends), np.array(expanded_per_level(shape)[:-1] or [0])
