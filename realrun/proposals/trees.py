"""The draft trees of every position of an output, by best-first expansion of many positions side by side.

The record of a position holds the chain (the first sibling at every depth) and the nodes of largest path
probability, M together. At first the chain and all siblings along it are known. Then, pass by pass, each position
expands the best of its M best known nodes, until all M have been expanded or lie at the last depth.

This finds the best M. A node unknown at the end descends from a known node that was not expanded, and which is
therefore not among the best M. No path is larger than its beginning, so the best M come before the unknown node as
well. For the same reason no node outside the record has a larger path than the largest known node outside: this is the
horizon, and it is tight because it is the path of a node.

Nodes of equal path stand in the order in which they became known, which puts ancestors
before descendants and siblings by rank, so that a record is a tree and siblings in it are the
first ranks. Children of a node of path 0 have path 0 too and are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from specsim.io.arrays import Array
from specsim.trace.tree_record import NO_TOKEN

CHUNK_NODES = 1024  # recorded nodes of the positions that share their passes
PASS_NODES = 16  # nodes that a position expands in a pass, at most
CHAIN_KEY = 2.0  # above every path
NO_NODE = -1.0  # key where a position has fewer nodes than others
ROOT = -1  # parent of the nodes of depth 1
NOT_EXPANDED = -1

# (index of the position, depth, number of the parent, token) of n nodes [n] -> their children's tokens, probs [n, W]
Expand = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


class Noise(NamedTuple):
    """How a sequence's tokens are chosen; its number keys the noise."""

    sampler: Sampler
    sequence: int


class TreeSize(NamedTuple):
    """Size of the tree recorded for a position: at most M nodes; children of ranks below `width`."""

    nodes: int
    width: int


class Trees(NamedTuple):
    """Nodes 1 .. M of P positions in level order, [P, M], -1 beyond the last (prob 0); horizon [P]."""

    parent: Array
    token: Array
    prob: Array
    horizon: Array


class Known(NamedTuple):
    """Known nodes of P positions, [P, m] each.

    key : what they are ordered by: the path, but no more than the parent's and elder siblings' keys,
        as rounding could make it; CHAIN_KEY in the chain
    number, parent : of the node and of its parent, counted over the expanded nodes of all P positions
    """

    key: Array
    path: Array
    prob: Array
    token: Array
    rank: Array
    depth: Array
    parent: Array
    number: Array


ABSENT = (NO_NODE, 0.0, 0.0, NO_TOKEN, 0, 0, ROOT, NOT_EXPANDED)  # fields of Known that are no node


@torch.inference_mode()
def grown_trees(
    lm: CachedLM, noise: Noise, first: int, tokens: Array, probs: Array, nodes: int, pending: Array | None = None
) -> Trees:
    """Grow the trees of `nodes` nodes of every position of an output of T tokens.

    lm : holds the prompt of `first` tokens and the output but for its last token, and does so again afterwards
    tokens, probs : [T, D, W], the siblings along each position's chain, in order, by `Sampler.candidates`
    pending : [T], the token before each position, for drafters that do not use its cached keys and values
        but make their own
    """
    total, parts = len(tokens), []
    step = max(CHUNK_NODES // nodes, 1)
    for begin in range(0, total, step):
        chunk = slice(begin, min(begin + step, total))
        roots = None if pending is None else pending[chunk]
        branches = Branches(lm, noise, first + np.arange(begin, chunk.stop), tokens.shape[2], begin, roots)
        branches.append_chains(tokens[chunk, :-1, 0])
        parts.append(best_trees(tokens[chunk], probs[chunk], nodes, branches.expand))
        branches.remove()
    return joined_trees(parts)


def joined_trees(parts: Sequence[Trees]) -> Trees:
    """Join the trees of consecutive chunks of positions."""
    return Trees(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def best_trees(tokens: Array, probs: Array, nodes: int, expand: Expand) -> Trees:
    """Find the trees of P positions, from the siblings along their chains, [P, D, W].

    expand : gives the children of nodes. It numbers the nodes in the order of the calls; the chains' nodes above the
        last depth have the first numbers, position by position
    """
    positions, depth, width = tokens.shape
    chain = np.arange(positions * (depth - 1)).reshape(positions, depth - 1)
    above = np.concatenate([np.full((positions, 1), ROOT), chain], axis=1)
    on_chain = np.multiply.accumulate(probs[:, :, 0].astype(np.float32), axis=1)
    path = np.concatenate([np.ones((positions, 1), np.float32), on_chain[:, :-1]], axis=1)
    known = children(path, path, above, np.broadcast_to(np.arange(depth), path.shape), tokens, probs)
    known.key[:, :, 0] = CHAIN_KEY
    known.number[:, :-1, 0] = chain
    known = Known(*(field.reshape(positions, depth * width) for field in known))
    horizon = np.zeros(positions, np.float32)
    numbered = chain.size
    while True:
        order = np.argsort(-known.key, axis=1, kind="stable")
        outside = np.take_along_axis(known.path, order[:, nodes:], axis=1)
        horizon = np.maximum(horizon, outside.max(axis=1, initial=0))
        known = Known(*(np.take_along_axis(field, order[:, :nodes], axis=1) for field in known))
        asked = (known.number == NOT_EXPANDED) & (known.depth < depth) & (known.path > 0)
        asked &= np.cumsum(asked, axis=1) <= PASS_NODES
        rows, columns = np.nonzero(asked)
        if len(rows) == 0:
            return in_level_order(known, nodes, horizon)
        # By output position, so that nodes that share their noise lie side by side.
        order = np.argsort(rows + known.depth[rows, columns], kind="stable")
        rows, columns = rows[order], columns[order]
        known.number[rows, columns] = numbered + np.arange(len(rows))
        numbered += len(rows)
        at = Known(*(field[rows, columns] for field in known))
        new = children(at.key, at.path, at.number, at.depth, *expand(rows, at.depth, at.parent, at.token))
        known = with_children(known, new, rows, np.cumsum(asked, axis=1)[rows, columns] - 1)


def children(key: Array, path: Array, number: Array, depth: Array, tokens: Array, probs: Array) -> Known:
    """Make the children [..., W] of nodes [...] from their tokens and probs [..., W]."""
    probs = probs.astype(np.float32)
    paths = path[..., None] * probs
    return Known(
        key=np.minimum.accumulate(np.minimum(paths, key[..., None]), axis=-1),
        path=paths,
        prob=probs,
        token=tokens,
        rank=np.broadcast_to(np.arange(probs.shape[-1]), probs.shape),
        depth=np.broadcast_to(depth[..., None] + 1, probs.shape),
        parent=np.broadcast_to(number[..., None], probs.shape),
        number=np.full(probs.shape, NOT_EXPANDED),
    )


def with_children(known: Known, new: Known, rows: Array, places: Array) -> Known:
    """Append children [n, W] to the known nodes [P, m]; children i go to row rows[i], in slot places[i]."""
    shape = (len(known.key), int(places.max()) + 1, new.key.shape[1])
    fields = []
    for before, added, absent in zip(known, new, ABSENT, strict=True):
        field = np.full(shape, absent, before.dtype)
        field[rows, places] = added
        fields.append(np.concatenate([before, field.reshape(len(field), -1)], axis=1))
    return Known(*fields)


def in_level_order(known: Known, nodes: int, horizon: Array) -> Trees:
    """Make trees of these nodes; nodes above the last depth that have children are numbered."""
    positions = len(known.key)
    shape = (positions, nodes)
    trees = Trees(np.full(shape, -1), np.full(shape, NO_TOKEN), np.zeros(shape, np.float32), horizon)
    count = np.zeros(positions, np.int64)
    place = np.zeros(known.number.max() + 2, np.int64)  # in its tree, of each numbered node; the last is the root's
    here = known.key >= 0
    for depth in range(1, int(known.depth.max()) + 1):
        rows, columns = np.nonzero(here & (known.depth == depth))
        parent = place[known.parent[rows, columns]]
        order = np.lexsort((known.rank[rows, columns], parent, rows))
        rows, columns, parent = rows[order], columns[order], parent[order]
        level = np.bincount(rows, minlength=positions)
        at = count[rows] + np.arange(len(rows)) - (np.cumsum(level) - level)[rows]
        trees.parent[rows, at] = parent
        trees.token[rows, at] = known.token[rows, columns]
        trees.prob[rows, at] = known.prob[rows, columns]
        number = known.number[rows, columns]
        place[number[number != NOT_EXPANDED]] = at[number != NOT_EXPANDED] + 1
        count += level
    return trees


class Branches:
    """Expanded nodes of a chunk of positions in a model's cache, behind a prefix that all share.

    visible : [P], tokens of the prefix that each position has before it
    begin : output position of the first
    roots : [P], the last of those tokens, where every position has a node of its own for it; these come first
    """

    def __init__(
        self,
        lm: CachedLM,
        noise: Noise,
        visible: Array,
        width: int,
        begin: int,
        roots: Array | None = None,
    ):
        self.lm, self.noise, self.visible = lm, noise, visible
        self.width, self.begin = width, begin
        self.lineage = np.zeros((0, 0), np.bool_)  # [n, n], which nodes are each node's ancestors or itself
        self.roots = 0 if roots is None else len(roots)
        if roots is not None:
            owner = np.arange(self.roots)
            self._append(owner, np.zeros_like(owner), np.eye(self.roots, dtype=np.bool_), roots, keep=1)

    def append_chains(self, tokens: Array) -> None:
        """Append the chains' nodes [P, D - 1], whose children are known."""
        positions, depth = tokens.shape
        if depth == 0:
            return
        owner, depths = np.divmod(np.arange(tokens.size), depth)
        root = np.eye(positions, self.roots)[owner]
        lineage = np.hstack([root, np.kron(np.eye(positions), np.tri(depth))]) > 0
        self._append(owner, depths + 1, lineage, tokens.ravel(), keep=1)

    def expand(self, owner: Array, depth: Array, parent: Array, tokens: Array) -> tuple[Array, Array]:
        """Append nodes and find their children; see `Expand`."""
        before = len(self.lineage)
        lineage = np.zeros((len(owner), before + len(owner)), np.bool_)
        above = np.where(parent == ROOT, owner, self.roots + parent)
        below = (parent != ROOT) | (self.roots > 0)
        lineage[below, :before] = self.lineage[above[below]]
        np.fill_diagonal(lineage[:, before:], True)
        logits = self._append(owner, depth, lineage, tokens, keep=0)
        for_output = (self.begin + owner + depth).tolist()
        sampler, sequence = self.noise
        children, probs = sampler.candidates(logits, sequence, for_output, self.width)
        return children.cpu().numpy(), probs.cpu().numpy()

    def remove(self) -> None:
        """Drop all nodes from the cache."""
        self.lm.truncate(self.lm.length)

    def _append(self, owner: Array, depth: Array, lineage: Array, tokens: Array, keep: int) -> torch.Tensor:
        """Compute logits after new nodes, or after the last `keep`; lineage [n, nodes + n]."""
        visible = self.visible[owner]
        before = visible - (self.roots > 0)  # what a root sees of the prefix ends before its own token
        seen = np.concatenate([np.arange(self.lm.length) < before[:, None], lineage], axis=1)
        self.lineage = np.concatenate([np.pad(self.lineage, ((0, 0), (0, len(owner)))), lineage])
        return self.lm.append_rows(tokens.tolist(), (visible + depth - 1).tolist(), torch.from_numpy(seen), keep)
