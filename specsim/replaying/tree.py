"""The replay kernels of tree policies: of static trees, and of trees that grow by the drafter's probabilities.

The accepted path follows from `true_rank` alone: at every depth, the rank of the true token
among the children of the node before. So a static tree replays without recorded nodes (`_replay_static`).
Under typical acceptance (`specsim.trace.typical`) the recorded nodes say which of them are accepted, and every tree is
replayed as one that grows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numba as nb
import numpy as np

from specsim.cost.table import CostTable
from specsim.io.arrays import Array, Bools, IntArray, Ints, Seconds
from specsim.io.compiled import njit
from specsim.io.errors import InputError
from specsim.io.rng import uniform

# `tree_kernel` rebinds `expand`, `initial_state`, `select` and `update` to each policy's own functions.
from specsim.policy.memoryless import initial_state, update
from specsim.policy.tree.base import MAX_DRAFTED, UNKNOWN, Tree, TreePolicy, close_kept, new_tree
from specsim.policy.tree.static import StaticTree, expand, expanded_per_level, select
from specsim.replaying.kernel import select_fields, specialise
from specsim.replaying.rounds import RoundLog, Sums
from specsim.trace.trace import Trace


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


@njit(nogil=True, error_model="numpy")
def _replay_static(  # type: ignore[no-untyped-def]
    tree, which, trace, costs, sums, log
):
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


class TreeTrace(NamedTuple):
    """What the kernel reads of a trace; see `Trace` and `TreeRecord`."""

    offsets: IntArray
    sequence_id: IntArray
    prompt_tokens: IntArray
    budget_tokens: IntArray
    true_rank: IntArray
    prob: Array
    first_child: IntArray
    horizon: Array
    score: Array  # [0, 0] where the trace has none
    plausible: Bools  # [0, 0] where the true path decides


class TreeRule(NamedTuple):
    """What the kernel reads of a policy; see `TreePolicy`."""

    params: Any
    carries_state: bool
    max_draft_tokens: int
    max_verified_nodes: int
    max_expanded: int


class Room(NamedTuple):
    """What a round writes to, over nodes; made outside of the kernel, which would take longer to compile.

    recorded : number of each node in the record, -1 if it is not there
    child : first child of each node
    reached : whether a lossy verifier accepts a node and all before it
    """

    tree: Tree
    recorded: IntArray
    child: IntArray
    widths: IntArray
    keep: Bools
    reached: Bools


def _room() -> Room:
    recorded, child, widths = np.zeros((3, MAX_DRAFTED + 1), np.int32)
    keep, reached = np.zeros((2, MAX_DRAFTED + 1), np.bool_)
    return Room(new_tree(), recorded, child, widths, keep, reached)


@nb.njit
def _longest_plausible(tree, count, keep, recorded, plausible, most, reached):  # type: ignore[no-untyped-def]
    """Find the end of the longest accepted path, no deeper than `most`: (its last node, whether the record decides).

    As `realrun.decode.verify.longest_path`: of paths that are as long, that to the node of lowest index.

    plausible : bool [M], of the recorded nodes
    """
    last_node, decided = np.int64(0), True
    reached[0] = True
    for node in range(1, count):
        reached[node] = False
        if keep[node] and reached[tree.parent[node]]:
            decided &= recorded[node] >= 0
            reached[node] = recorded[node] >= 0 and plausible[recorded[node] - 1]
            if reached[node] and tree.depth[node] > tree.depth[last_node]:
                last_node = np.int64(node)
    while tree.depth[last_node] > most:
        last_node = np.int64(tree.parent[last_node])
    return last_node, decided


def _replay(  # type: ignore[no-untyped-def]
    rule, seed, which, trace, costs, room, sums, log
):
    """Replay the sequences `which` under a policy, whose functions `tree_kernel` binds.

    Every round grows the tree level by level, as a drafter does, with the children that the
    record holds; those it does not hold are UNKNOWN nodes. Where these might have been verified
    the round is truncated: it goes on as if they had not been drafted, and is counted.
    """
    params, carries_state, max_draft_tokens, max_verified_nodes, max_expanded = rule
    offsets, true_rank, horizon = trace.offsets, trace.true_rank, trace.horizon
    prob, first_child, score, plausible = trace.prob, trace.first_child, trace.score, trace.plausible
    bucket_bits, draft_s, catch_up_s = costs.bucket_bits, costs.draft_s, costs.catch_up_s
    wider_s, verify_s = costs.wider_s, costs.verify_s
    tree, recorded, child, widths, keep, reached = room
    log_row = 0
    logging = len(log.t) > 0
    state = initial_state(params)
    for i, s in enumerate(which):
        if not carries_state:
            state = initial_state(params)
        start, end = offsets[s], offsets[s + 1]
        base_context = trace.prompt_tokens[s] - start - 1
        sequence_id, budget_tokens = trace.sequence_id[s], trace.budget_tokens[s]
        t = start
        behind = 0  # 1 where the draft cache lacks the last accepted token, which was not expanded
        rounds = all_drafted = all_accepted = all_asked = all_verified = truncated = np.int64(0)
        draft_time = verify_time = 0.0
        while t < end:
            bucket = (base_context + t) >> bucket_bits
            asked_before, round_draft_s = all_asked, 0.0
            limit = min(max_draft_tokens, budget_tokens - (t - start) - 1)
            # Typed from the start: functions are compiled anew for a number known to be 0 or 1.
            first, count, level = np.int64(0), np.int64(1), np.int64(0)
            chain = np.int64(0)  # node of the newest level on the first candidates' chain, -1 where that has ended
            unknown = False
            widths[0] = 0
            while level < limit:
                last = count
                state = expand(state, params, tree, first, last, uniform(seed, sequence_id, t - start, level), widths)
                all_asked += 1
                level += 1
                expanded = 0
                for node in range(first, last):
                    width = min(max(widths[node], 0), len(keep) - count)
                    widths[node] = width
                    child[node] = count
                    if width == 0:
                        continue
                    expanded += 1
                    path, known, begin = tree.path[node], np.int64(0), np.int64(0)
                    if recorded[node] >= 0:
                        begin = np.int64(first_child[t, recorded[node]])
                        known = np.int64(first_child[t, recorded[node] + 1]) - begin
                    unknown |= known < width
                    for rank in range(width):
                        p = np.float64(prob[t, begin + rank - 1]) if rank < known else UNKNOWN
                        tree.prob[count] = p
                        tree.path[count] = path * p if rank < known else UNKNOWN
                        tree.parent[count] = node
                        tree.rank[count] = rank
                        tree.depth[count] = level
                        recorded[count] = begin + rank if rank < known else -1
                        widths[count] = 0
                        count += 1
                if expanded == 0:
                    level -= 1
                    break
                if expanded > max_expanded:
                    raise InputError("a tree policy expands more nodes of a level than its max_expanded; correct it")
                pass_s = draft_s[level, bucket] - draft_s[level - 1, bucket] + wider_s[expanded, bucket]
                draft_time += pass_s
                round_draft_s += pass_s
                if len(score) > 0:
                    if chain >= 0 and widths[chain] > 0:
                        tree.score[level - 1] = score[t, level - 1]
                        chain = np.int64(child[chain])
                    else:
                        tree.score[level - 1] = tree.score[level - 2]
                        chain = np.int64(-1)
                first = last
            verified = accepted = last_node = np.int64(0)
            if count > 1:
                keep[:count] = False
                keep[0] = True
                floor = select(state, params, tree, count, keep)
                verified, depth = close_kept(tree, count, keep)
                if verified > max_verified_nodes:
                    raise InputError("a tree policy verifies more nodes than its max_nodes; correct it")
                decided = not (unknown and horizon[t] >= floor)
                if len(plausible) > 0:
                    last_node, among = _longest_plausible(tree, count, keep, recorded, plausible[t], end - t, reached)
                    accepted = np.int64(tree.depth[last_node])
                    decided &= among
                if not decided:
                    truncated += 1
                while accepted < level and len(plausible) == 0:
                    true = np.int64(true_rank[t, accepted])
                    if true < 0 or true >= widths[last_node] or not keep[child[last_node] + true]:
                        break
                    last_node = child[last_node] + true
                    accepted += 1
                draft_time += behind * catch_up_s[bucket]
                round_draft_s += behind * catch_up_s[bucket]
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
                log.draft_s[log_row] = round_draft_s
                log.policy_s[log_row] = (all_asked - asked_before) * costs.policy_step_s
                log.verify_s[log_row] = verify_s[verified + 1, bucket]
                log.other_s[log_row] = costs.round_overhead_s
                log_row += 1
            t += accepted + 1
        sums.num_rounds[i] += rounds
        sums.drafted[i] += all_drafted
        sums.accepted[i] += all_accepted
        sums.policy_steps[i] += all_asked
        sums.verified[i] += all_verified
        sums.truncated[i] += truncated
        sums.draft_s[i] += draft_time
        sums.policy_s[i] += all_asked * costs.policy_step_s
        sums.verify_s[i] += verify_time
        sums.other_s[i] += rounds * costs.round_overhead_s
    return log_row


@cache
def _grown_kernel(kind: type[TreePolicy]) -> Callable[..., int]:
    """Compile the kernel of trees whose nodes are read from the record."""
    return specialise(_replay, globals(), kind)


def tree_kernel(kind: type[TreePolicy]) -> Callable[..., int]:
    """Compile the kernel with a policy's functions inside; that of static policies needs none."""
    return _replay_static if issubclass(kind, StaticTree) else _grown_kernel(kind)  # type: ignore[arg-type]  # a class hashes well


def bind_tree(policy: TreePolicy) -> Callable[..., int]:
    """Bind the kernel to a policy; see `specsim.replaying.replay.bind_kernel`."""
    kernel = tree_kernel(type(policy))
    rule = select_fields(TreeRule, policy)

    def run(trace: Trace, table: CostTable, seed: int, which: Ints, sums: Sums, log: RoundLog) -> int:
        assert table.tree is not None and trace.true_rank is not None
        costs = select_fields(TreeCosts, table, table.tree)
        lossy = trace.tree is not None and trace.tree.plausible is not None
        if isinstance(policy, StaticTree) and not lossy:
            ranks = select_fields(StaticTrace, trace)
            return kernel(links(policy.shape), which, ranks, costs, sums, log.arrays)
        assert trace.tree is not None
        score = np.zeros((0, 0), np.float32) if trace.score is None else trace.score
        plausible = trace.tree.plausible if lossy else np.zeros((0, 0), np.bool_)
        recorded = select_fields(TreeTrace, trace, trace.tree, score=score, plausible=plausible)
        grown = _grown_kernel(type(policy))  # type: ignore[arg-type]  # a class hashes well
        return grown(rule, seed, which, recorded, costs, _room(), sums, log.arrays)

    return run
