"""The replay kernels of tree policies: one for trees that grow by what the drafter says, one for static ones.

The accepted path follows from `true_rank` alone: at every depth, the rank of the true token
among the children of the node before. So a static tree replays without recorded nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from specsim.arrays import Floats, IntArray, Ints
from specsim.cost.table import CostTable
from specsim.errors import InputError
from specsim.policy.tree.base import MAX_DRAFTED, UNKNOWN, Tree, TreePolicy, close_kept

# `specialise_tree` rebinds these four names to each policy's own functions.
from specsim.policy.tree.static import StaticTree, expand, initial_state, select, update
from specsim.replaying.chain import (
    ACCEPTED,
    DRAFT_S,
    DRAFTED,
    OTHER_S,
    POLICY_S,
    POLICY_STEPS,
    ROUNDS,
    TRUNCATED,
    VERIFIED,
    VERIFY_S,
)
from specsim.replaying.kernel import bind
from specsim.replaying.rounds import RoundLog
from specsim.replaying.static_tree import _links, _replay_static
from specsim.rng import uniform
from specsim.trace.trace import Trace


def _replay(  # type: ignore[no-untyped-def]
    params,
    carries_state,
    deepest,
    most_nodes,
    max_expanded,
    seed,
    which,
    offsets,
    sequence_id,
    prompt_tokens,
    budget_tokens,
    true_rank,
    prob,
    first_child,
    horizon,
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
    """The loop of one policy over the sequences `which`; `specialise_tree` binds the policy's functions.

    Every round grows the tree level by level, as a drafter does, with the children that the
    record holds; those it does not hold are UNKNOWN nodes. Where these might have been verified
    the round is truncated: it goes on as if they had not been drafted, and is counted.
    """
    room = MAX_DRAFTED + 1
    tree = Tree(
        np.zeros(room, np.float32),
        np.zeros(room, np.float32),
        np.zeros(room, np.int32),
        np.zeros(room, np.int32),
        np.zeros(room, np.int32),
        np.zeros(room, np.float64),
    )
    tree.path[0] = tree.prob[0] = 1.0
    tree.parent[0] = -1
    recorded = np.zeros(room, np.int32)  # number of each node in the record, -1 if it is not there
    child = np.zeros(room, np.int32)  # first child of each node
    widths = np.zeros(room, np.int32)
    keep = np.zeros(room, np.bool_)
    log_row = 0
    logging = len(log.t) > 0
    state = initial_state(params)
    for i, s in enumerate(which):
        if not carries_state:
            state = initial_state(params)
        start, end = offsets[s], offsets[s + 1]
        base_context = prompt_tokens[s] - start - 1
        t = start
        behind = 0  # 1 where the draft cache lacks the last accepted token, which was not expanded
        rounds = all_drafted = all_accepted = all_asked = all_verified = truncated = 0
        draft_time = verify_time = 0.0
        while t < end:
            bucket = (base_context + t) >> bucket_bits
            limit = min(deepest, budget_tokens[s] - (t - start) - 1)
            first, count, level = 0, 1, 0
            unknown = False
            widths[0] = 0
            while level < limit:
                last = count
                state = expand(
                    state, params, tree, first, last, uniform(seed, sequence_id[s], t - start, level), widths
                )
                all_asked += 1
                level += 1
                expanded = 0
                for node in range(first, last):
                    width = min(max(widths[node], 0), room - count)
                    widths[node] = width
                    child[node] = count
                    if width == 0:
                        continue
                    expanded += 1
                    path, known, begin = tree.path[node], np.int64(0), np.int64(0)
                    if recorded[node] >= 0:
                        begin = np.int64(first_child[t, recorded[node]])
                        known = min(np.int64(width), np.int64(first_child[t, recorded[node] + 1]) - begin)
                    unknown |= known < width
                    for rank in range(known):
                        p = prob[t, begin + rank - 1]
                        tree.prob[count] = p
                        tree.path[count] = path * p
                        tree.parent[count] = node
                        tree.rank[count] = rank
                        tree.depth[count] = level
                        recorded[count] = begin + rank
                        widths[count] = 0
                        count += 1
                    for rank in range(known, width):
                        tree.prob[count] = UNKNOWN
                        tree.path[count] = UNKNOWN
                        tree.parent[count] = node
                        tree.rank[count] = rank
                        tree.depth[count] = level
                        recorded[count] = -1
                        widths[count] = 0
                        count += 1
                if expanded == 0:
                    level -= 1
                    break
                if expanded > max_expanded:
                    raise InputError("a tree policy expands more nodes of a level than its max_expanded; correct it")
                draft_time += draft_s[level, bucket] - draft_s[level - 1, bucket] + wider_s[expanded, bucket]
                first = last
            verified = accepted = last_node = 0
            if count > 1:
                keep[:count] = False
                keep[0] = True
                floor = select(state, params, tree, count, keep)
                verified, depth = close_kept(tree, count, keep)
                if verified > most_nodes:
                    raise InputError("a tree policy verifies more nodes than its max_nodes; correct it")
                if unknown and horizon[t] >= floor:
                    truncated += 1
                while accepted < level:
                    true = np.int64(true_rank[t, accepted])
                    if true < 0 or true >= widths[last_node] or not keep[child[last_node] + true]:
                        break
                    last_node = child[last_node] + true
                    accepted += 1
                draft_time += behind * catch_up_s[bucket]
                state = update(state, params, depth, accepted)
                behind = 1 if accepted > 0 and widths[last_node] == 0 else 0
            else:
                behind = 1
            verify_time += verify_s[verified + 1, bucket]
            rounds += 1
            all_drafted += count - 1
            all_verified += verified
            all_accepted += accepted
            if logging:
                log.sequence[log_row] = s
                log.t[log_row] = t - start
                log.drafted[log_row] = count - 1
                log.accepted[log_row] = accepted
                log.verified[log_row] = verified
                if accepted > 0:
                    for node in range(1, last_node + 1):
                        log.last[log_row] += keep[node]
                log_row += 1
            t += accepted + 1
        counts[i, ROUNDS] += rounds
        counts[i, DRAFTED] += all_drafted
        counts[i, ACCEPTED] += all_accepted
        counts[i, POLICY_STEPS] += all_asked
        counts[i, VERIFIED] += all_verified
        counts[i, TRUNCATED] += truncated
        seconds[i, DRAFT_S] += draft_time
        seconds[i, POLICY_S] += all_asked * policy_step_s
        seconds[i, VERIFY_S] += verify_time
        seconds[i, OTHER_S] += rounds * round_overhead_s
    return log_row


@cache
def specialise_tree(kind: type[TreePolicy]) -> Callable[..., int]:
    """The kernel compiled with one policy's functions inside; a static policy's needs none."""
    return _replay_static if issubclass(kind, StaticTree) else bind(_replay, globals(), kind)


def run_tree(policy: TreePolicy) -> Callable[..., int]:
    """The kernel bound to one policy; see `specsim.replaying.replay.compiled`."""
    kernel = specialise_tree(type(policy))  # type: ignore[arg-type]  # a class hashes well

    def run(
        trace: Trace,
        table: CostTable,
        outcome: tuple[IntArray, int],
        which: Ints,
        counts: Ints,
        seconds: Floats,
        log: RoundLog,
    ) -> int:
        assert table.tree is not None
        costs = (
            table.bucket_bits,
            table.draft_s,
            table.catch_up_s,
            table.tree.wider_s,
            table.tree.verify_s,
            table.tree.policy_step_s,
            table.tree.round_overhead_s,
        )
        results = (counts, seconds, log.arrays)
        where = (which, trace.offsets)
        if isinstance(policy, StaticTree):
            lengths = (trace.prompt_tokens, trace.budget_tokens, trace.true_rank)
            return kernel(*_links(policy.shape), *where, *lengths, *costs, *results)
        assert trace.tree is not None
        return kernel(
            policy.params,
            policy.carries_state,
            policy.deepest,
            policy.most_nodes,
            policy.max_expanded,
            outcome[1],
            *where,
            trace.sequence_id,
            trace.prompt_tokens,
            trace.budget_tokens,
            trace.true_rank,
            trace.tree.prob,
            trace.tree.first_child,
            trace.tree.horizon,
            *costs,
            *results,
        )

    return run
