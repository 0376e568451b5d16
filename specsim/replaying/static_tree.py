"""The replay kernel of static trees, which need no recorded nodes."""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from specsim.io.arrays import IntArray, Seconds
from specsim.policy.tree.static import expanded_per_level


class StaticTrace(NamedTuple):
    """What the kernel reads of a trace; see `Trace`."""

    offsets: IntArray
    prompt_tokens: IntArray
    budget_tokens: IntArray
    true_rank: IntArray


class TreeCosts(NamedTuple):
    """What the kernels of trees read of a cost table; see `CostTable` and `TreeTable`."""

    bucket_bits: int
    draft_s: Seconds
    catch_up_s: Seconds
    wider_s: Seconds
    verify_s: Seconds
    policy_step_s: float
    round_overhead_s: float


class Links(NamedTuple):
    """A static tree.

    children, first_child : of every node, in level order
    level_end : [L + 1], nodes up to each depth
    expanded : [L], nodes of each depth that have children
    """

    children: IntArray
    first_child: IntArray
    level_end: IntArray
    expanded: IntArray


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _replay_static(  # type: ignore[no-untyped-def]
    tree, which, trace, costs, sums, log
):
    """Replay the sequences `which` with a static tree; see `specsim.replaying.tree`."""
    offsets, true_rank = trace.offsets, trace.true_rank
    children, first_child, level_end, expanded = tree.children, tree.first_child, tree.level_end, tree.expanded
    bucket_bits, draft_s, catch_up_s = costs.bucket_bits, costs.draft_s, costs.catch_up_s
    wider_s, verify_s = costs.wider_s, costs.verify_s
    log_row = 0
    levels = len(level_end) - 1
    for i, s in enumerate(which):
        start, end = offsets[s], offsets[s + 1]
        base_context = trace.prompt_tokens[s] - start - 1
        budget_tokens = trace.budget_tokens[s]
        t = start
        behind = 0
        while t < end:
            bucket = (base_context + t) >> bucket_bits
            limit = min(levels, budget_tokens - (t - start) - 1)
            drafted = level_end[limit] - 1
            accepted = node = 0
            while accepted < limit:
                rank = np.int64(true_rank[t, accepted])
                if rank < 0 or rank >= children[node]:
                    break
                node = first_child[node] + rank
                accepted += 1
            round_draft_s = 0.0
            if limit > 0:
                round_draft_s = draft_s[limit, bucket] + behind * catch_up_s[bucket]
                sums.draft_s[i] += round_draft_s
                for level in range(limit):
                    wider_pass_s = wider_s[expanded[level], bucket]
                    sums.draft_s[i] += wider_pass_s
                    round_draft_s += wider_pass_s
                behind = 1 if accepted > 0 and (accepted == limit or children[node] == 0) else 0
            sums.num_rounds[i] += 1
            sums.drafted[i] += drafted
            sums.accepted[i] += accepted
            sums.policy_steps[i] += limit
            sums.verified[i] += drafted
            sums.policy_s[i] += limit * costs.policy_step_s
            sums.verify_s[i] += verify_s[drafted + 1, bucket]
            sums.other_s[i] += costs.round_overhead_s
            if len(log.t) > 0:
                log.sequence[log_row] = s
                log.t[log_row] = t - start
                log.drafted[log_row] = log.verified[log_row] = drafted
                log.accepted[log_row] = accepted
                log.last[log_row] = node
                log.draft_s[log_row], log.policy_s[log_row] = round_draft_s, limit * costs.policy_step_s
                log.verify_s[log_row] = verify_s[drafted + 1, bucket]
                log.other_s[log_row] = costs.round_overhead_s
                log_row += 1
            t += accepted + 1
    return log_row


def links(shape: tuple[int, ...]) -> Links:
    """The links of a tree given by the children of every node in level order."""
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
    return Links(children, first, np.array(ends), np.array(expanded_per_level(shape)[:-1] or [0]))
