"""Recorded trees: at every position, the nodes that the drafter's best-first expansion finds.

A record of M nodes per position holds the chain that the drafter would draft, to the recorded
depth, and beside it the nodes of largest path probability. All ancestors of a node are in it,
and of every node's children the first few by rank. Whatever is not in it has a path
probability of at most the position's `horizon`, so a replay knows when it asked for more than
was recorded, and when that made no difference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Bools, IntArray
from specsim.io.errors import InputError

MAX_NODES = 1023  # per position
NO_TOKEN = -1


@dataclass(frozen=True, repr=False)
class TreeRecord:
    """N positions, up to M nodes each, numbered from 1 in level order; node 0 is the pending token.

    prob : float32 [N, M], of node j in column j - 1, given its parent; 0 beyond the last node
    token : int32 [N, M], -1 beyond the last node
    first_child : uint16 [N, M + 2], node i's children are first_child[i] .. first_child[i + 1] - 1,
        of ranks 0, 1, ...; the number of nodes plus 1 beyond the last node
    horizon : float32 [N], largest path probability that an unrecorded node of a rank below
        `width` and within the trace's depth can have
    width : ranks recorded of a node's children, at most
    target_prob : float32 [N, M], the target's probability of the node's token, given its parent; None if not recorded
    target_entropy_nats : float32 [N, M], entropy of the target's distribution at the node's parent; None likewise
    plausible : bool [N, M], nodes that a lossy verifier accepts once their parent is accepted; None where the true path
        decides. Not in files: see `specsim.trace.typical`
    """

    prob: npt.NDArray[np.float32]
    token: IntArray
    first_child: IntArray
    horizon: npt.NDArray[np.float32]
    width: int
    target_prob: npt.NDArray[np.float32] | None = None
    target_entropy_nats: npt.NDArray[np.float32] | None = None
    plausible: Bools | None = None

    def __repr__(self) -> str:
        return f"TreeRecord: {len(self.prob):,} positions, up to {self.nodes} nodes, {self.width} children a node"

    @property
    def nodes(self) -> int:
        """M, the most nodes recorded at a position."""
        return int(self.prob.shape[1])

    @property
    def count(self) -> IntArray:
        """Nodes recorded per position [N]."""
        return self.first_child[:, -1].astype(np.int64) - 1

    @cached_property
    def parent(self) -> IntArray:
        """Parent of node j in column j - 1, int16 [N, M]; -1 beyond the last node."""
        children = np.diff(self.first_child.astype(np.int64), axis=1)
        result = np.full(self.prob.shape, -1, dtype=np.int16)
        nodes = np.broadcast_to(np.arange(self.nodes + 1), children.shape)
        result[np.arange(self.nodes) < self.count[:, None]] = np.repeat(
            nodes.ravel(), children.ravel().astype(np.int64)
        )
        return result

    @cached_property
    def rank(self) -> IntArray:
        """Rank among siblings of node j in column j - 1, int16 [N, M]; -1 beyond the last node."""
        parent = self.parent.astype(np.int64)
        first = np.take_along_axis(self.first_child.astype(np.int64), np.maximum(parent, 0), axis=1)
        return np.where(parent < 0, -1, np.arange(1, self.nodes + 1) - first).astype(np.int16)

    @cached_property
    def depth(self) -> IntArray:
        """Depth of node j in column j - 1, from 1, int16 [N, M]; -1 beyond the last node."""
        result = np.zeros((len(self.prob), self.nodes + 1), dtype=np.int16)
        rows = np.arange(len(result))
        for node in range(1, self.nodes + 1):
            parent = self.parent[:, node - 1]
            result[:, node] = np.where(parent < 0, -1, result[rows, np.maximum(parent, 0)] + 1)
        return result[:, 1:]

    @cached_property
    def path(self) -> npt.NDArray[np.float32]:
        """Path probability of node j in column j - 1, float32 [N, M]: products along the path; 0 beyond the last."""
        result = np.ones((len(self.prob), self.nodes + 1), dtype=np.float32)
        rows = np.arange(len(result))
        for node in range(1, self.nodes + 1):
            parent = self.parent[:, node - 1]
            result[:, node] = np.where(parent < 0, 0, result[rows, np.maximum(parent, 0)] * self.prob[:, node - 1])
        return result[:, 1:]

    def on_path(self, token: IntArray, offsets: IntArray) -> Bools:
        """Which nodes lie on the true path, bool [N, M]; token [N] and offsets [S + 1] are the trace's."""
        result = np.zeros((len(self.prob), self.nodes + 1), dtype=bool)
        result[:, 0] = True
        rows = np.arange(len(result))
        end = np.repeat(offsets[1:], np.diff(offsets))
        for node in range(1, self.nodes + 1):
            at = rows + self.depth[:, node - 1] - 1
            inside = (self.parent[:, node - 1] >= 0) & (at < end)
            true = self.token[:, node - 1] == token[np.minimum(at, len(token) - 1)]
            result[:, node] = inside & true & result[rows, np.maximum(self.parent[:, node - 1], 0)]
        return result[:, 1:]

    def select(self, rows: IntArray) -> TreeRecord:
        """The record of these positions."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        arrays: dict[str, Any] = {
            name: values[rows] for name, values in columns.items() if isinstance(values, np.ndarray)
        }
        return dataclasses.replace(self, **arrays)


def record_from_nodes(
    parent: IntArray,
    token: IntArray,
    prob: npt.NDArray[np.float32],
    horizon: npt.NDArray[np.float32],
    width: int,
    target_prob: npt.NDArray[np.float32] | None = None,
    target_entropy_nats: npt.NDArray[np.float32] | None = None,
) -> TreeRecord:
    """A record from parents [N, M] (-1 beyond the last node) of nodes in level order.

    Raises InputError where parents are those of no tree in level order.
    """
    here = parent >= 0
    node = np.arange(1, parent.shape[1] + 1)
    filled = node <= here.sum(axis=1)[:, None]
    least = np.maximum.accumulate(np.where(here, parent, 0), axis=1)
    rising = (np.where(here, parent, least) >= least).all()
    if not (np.array_equal(filled, here) and rising and (parent < node).all()):
        raise InputError("recorded trees: parents are not those of trees in level order; record again")
    rows, columns = np.nonzero(here)
    # children[r, i]: how many nodes have parent i; their running sum says where each node's children begin.
    children = np.zeros((len(parent), parent.shape[1] + 1), dtype=np.int64)
    np.add.at(children, (rows, parent[rows, columns]), 1)
    first = np.concatenate([np.ones((len(parent), 1), dtype=np.int64), 1 + np.cumsum(children, axis=1)], axis=1)
    return TreeRecord(
        prob=np.where(here, prob, 0).astype(np.float32),
        token=np.where(here, token, NO_TOKEN).astype(np.int32),
        first_child=first.astype(np.uint16),
        horizon=np.asarray(horizon, dtype=np.float32),
        width=width,
        target_prob=target_prob,
        target_entropy_nats=target_entropy_nats,
    )


def longest_plausible(tree: TreeRecord) -> IntArray:
    """Depth [N] of the longest path of nodes that are all `plausible`."""
    assert tree.plausible is not None
    reached = np.zeros((len(tree.prob), tree.nodes + 1), dtype=bool)
    reached[:, 0] = True
    rows = np.arange(len(reached))
    for node in range(1, tree.nodes + 1):
        parent = tree.parent[:, node - 1]
        reached[:, node] = (parent >= 0) & tree.plausible[:, node - 1] & reached[rows, np.maximum(parent, 0)]
    return np.where(reached[:, 1:], tree.depth, 0).max(axis=1).astype(np.int64)
