"""A draft tree from a draft model: level by level, one pass for each.

The same steps as in `specsim.replaying.tree`, whose nodes come from a record instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba as nb
import numpy as np
import torch

from realrun.decode.draft import Draft, Siblings, params_of
from realrun.decode.rounds import RoundContext
from realrun.decode.siblings import draw_siblings
from realrun.lm.cached import CachedLM
from realrun.lm.clock import now
from realrun.lm.number_type import refuse_logits
from specsim.arrays import Array
from specsim.errors import InputError
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy, close_kept, limit_widths, new_tree


class TreeGrower:
    """Grows trees on a draft model's cache.

    tree, token : the nodes drafted so far, the root first
    slot : int32, where each node stands among the nodes of the draft's cache, -1 while it is not
        expanded. All expanded nodes but the root do, whose token is a cached one
    """

    def __init__(self, lm: CachedLM):
        self.lm = lm
        room = MAX_DRAFTED + 1
        self.tree, self.token = new_tree(), np.zeros(room, dtype=np.int64)
        self.slot, self.widths = np.zeros(room, dtype=np.int32), np.zeros(room, dtype=np.int32)
        self.keep = np.zeros(room, dtype=np.bool_)

    def warm(self, policy: TreePolicy, length: int) -> None:
        """Get the model ready for this policy's passes over sequences of `length` tokens."""
        nodes = policy.max_expanded * policy.max_draft_tokens
        self.lm.warm(range(1, max(2, policy.max_expanded) + 1), length + nodes, nodes)

    def grow(
        self,
        tokens: Sequence[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
        siblings: Siblings,
        score: Callable[[int], torch.Tensor] | None = None,
    ) -> tuple[Draft, Any]:
        """A tree of up to `limit` levels after `tokens`, for output positions `position` and on; with the new state.

        Where the policy expands nothing at the root, no pass is made and nothing drafted.

        score : the predictor's [1] of what the last pass drafted at this depth, from 1, along the first candidates'
            chain; None where the policy reads none
        """
        sampler, sequence, position, limit, _ = context
        tree, widths, params = self.tree, self.widths, params_of(policy)
        draft = Draft(siblings=siblings, fed=len(tokens) - self.lm.length)
        drawn_from: dict[int, torch.Tensor] = {}
        first, count = 0, 1
        chain = 0  # node of the newest level on the first candidates' chain, -1 where that has ended
        widths[0] = 0
        for level in range(limit):
            asked, end = now(), count
            state = policy.expand(state, params, tree, first, end, context.policy_uniform(level), widths)
            drafted, expanded = limit_widths(widths, first, end, MAX_DRAFTED + 1 - count)
            if expanded > policy.max_expanded:
                raise InputError(f"policy {policy} expands {expanded} nodes of a level, more than its max_expanded")
            start = now()
            draft.policy_s += start - asked
            draft.asked += 1
            if not drafted:
                break
            parents = expanded_nodes(widths, first, end, expanded)
            logits = self._pass(tokens, parents, level)
            each = widths[parents]
            if siblings == "top_k":
                # Rows of one memory are one distribution, as all nodes of a level have it that no token changes.
                rows = logits[:1] if expanded > 1 and logits.stride(0) == 0 else logits
                found, probs = sampler.candidates(rows, sequence, [position + level] * len(rows), int(each.max()))
                found, probs = found.expand(expanded, -1), probs.expand(expanded, -1)
            else:
                drawn = draw_siblings(logits, siblings, each.tolist(), sampler, sequence, position, count)
                found, probs = drawn.tokens, drawn.probs
                drawn_from |= zip(parents.tolist(), drawn.rows, strict=True)
            parts = [found.double(), probs.double()]
            chain = count if parents[0] == chain else -1  # a level begins with it, and with its children if it has any
            if score is not None and chain >= 0:
                parts.append(score(level + 1).double().expand(expanded, 1))
            # The only copy from the device to the host in a pass.
            columns = torch.cat(parts, dim=1).cpu().numpy()
            # Every expanded node has a first child; later columns of narrower nodes are filled with -1.
            if np.isnan(columns).any() or (columns[:, 0] < 0).any():
                raise refuse_logits(self.lm, tokens, "drafter")
            if score is not None:  # of float32, as traces hold it
                tree.score[level] = np.float32(columns[0, -1]) if chain >= 0 else tree.score[level - 1]
            count = add_level(tree, self.token, widths, self.slot, parents, count, level + 1, columns)
            first = end
            draft.level_nodes.append(expanded)
            draft.step_s.append(now() - start)
        draft.drafted = count - 1
        if draft.drafted:
            self._select(draft, count, policy, state, drawn_from)
        return draft, state

    def commit(self, path: Sequence[int]) -> None:
        """Keep the cache of these nodes of the tree, the accepted ones; the last may be a leaf, which it lacks."""
        self.lm.keep_nodes([slot for slot in (int(self.slot[node]) for node in path) if slot >= 0])

    def _pass(self, tokens: Sequence[int], nodes: Array, level: int) -> torch.Tensor:
        """Logits [n, V] after these nodes of a level, which then are in the cache."""
        if level == 0:
            return self.lm.forward(tokens[self.lm.length :])[-1:]
        visible = ingest(self.tree.parent, self.slot, nodes, self.lm.nodes)
        fed = self.token[nodes].tolist()
        return self.lm.forward_nodes(fed, [level - 1] * len(fed), torch.from_numpy(visible))

    def _select(
        self, draft: Draft, count: int, policy: TreePolicy, state: Any, drawn_from: dict[int, torch.Tensor]
    ) -> None:
        """Write into the draft what the policy keeps."""
        keep = self.keep
        keep[:count] = False
        keep[0] = True
        policy.select(state, params_of(policy), self.tree, count, keep)
        kept, _ = close_kept(self.tree, count, keep)
        if kept > policy.max_verified_nodes:
            raise InputError(f"policy {policy} verifies {kept} nodes, more than its max_nodes; correct it")
        nodes, parents = kept_nodes(self.tree.parent, keep, count, kept)
        draft.nodes, draft.parents = nodes.tolist(), parents.tolist()
        draft.tokens = self.token[nodes].tolist()
        if drawn_from:
            draft.probs = [drawn_from[parent] for parent in self.tree.parent[nodes].tolist()]


@nb.njit(cache=True)
def expanded_nodes(widths, first, end, expanded):  # type: ignore[no-untyped-def]
    """The nodes of first .. end - 1 that get children."""
    nodes = np.empty(expanded, np.int64)
    at = 0
    for node in range(first, end):
        if widths[node] > 0:
            nodes[at] = node
            at += 1
    return nodes


@nb.njit(cache=True)
def ingest(parent, slot, nodes, held):  # type: ignore[no-untyped-def]
    """Give these nodes the slots behind the `held` ones; bool [n, held + n], which slots each sees."""
    visible = np.zeros((len(nodes), held + len(nodes)), np.bool_)
    for row, node in enumerate(nodes):
        slot[node] = held + row
        at = node
        while at > 0:
            visible[row, slot[at]] = True
            at = parent[at]
    return visible


@nb.njit(cache=True)
def add_level(tree, token, widths, slot, parents, count, level, columns):  # type: ignore[no-untyped-def]
    """Append the children of these nodes; the nodes then.

    columns [n, 2 w] or [n, 2 w + 1]: tokens, then probabilities, then what is not read here
    """
    most = columns.shape[1] // 2
    for row, node in enumerate(parents):
        widths[node] = min(widths[node], most)  # there are no more tokens
        for rank in range(widths[node]):
            prob = np.float32(columns[row, most + rank])
            token[count] = np.int64(columns[row, rank])
            tree.prob[count] = prob
            tree.path[count] = tree.path[node] * prob
            tree.parent[count] = node
            tree.rank[count] = rank
            tree.depth[count] = level
            widths[count] = 0
            slot[count] = -1
            count += 1
    return count


@nb.njit(cache=True)
def kept_nodes(parent, keep, count, kept):  # type: ignore[no-untyped-def]
    """The kept nodes beside the root and their parents, numbered among them: -1 the root, 0 the first kept."""
    nodes, parents = np.empty(kept, np.int64), np.empty(kept, np.int64)
    number = np.full(count, -1)
    at = 0
    for node in range(1, count):
        if keep[node]:
            nodes[at], parents[at], number[node] = node, number[parent[node]], at
            at += 1
    return nodes, parents
