"""Shapes of draft trees: child counts in level order, the root first.

A shape is a tuple of ints, the number of children of each node. Node 0 is the root,
the pending token; the others follow by depth, then by parent, siblings by rank (from 0). So
(2, 1, 0, 0) is a root with two children; the first has a child.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Ints
from specsim.io.errors import InputError

Shape = tuple[int, ...]
Path = tuple[int, ...]  # the ranks on the way from the root to a node; () is the root


def from_paths(choices: Iterable[Sequence[int]]) -> Shape:
    """Return the shape with these nodes, written as in MEDUSA: [(0,), (0, 0), (1,), ...], in any order.

    InputError unless every node's parent and all siblings of smaller rank are given too.
    """
    nodes = {tuple(int(rank) for rank in choice) for choice in choices} - {()}
    if not nodes:
        raise InputError("tree: no node given; give at least 1 path, such as (0,)")
    for node in sorted(nodes, key=_level_order):
        if min(node) < 0:
            raise InputError(f"tree: path {node} has a negative rank; ranks count from 0")
        if node[:-1] and node[:-1] not in nodes:
            raise InputError(f"tree: path {node} lacks its parent {node[:-1]}; give that too")
        elder = (*node[:-1], node[-1] - 1)
        if node[-1] and elder not in nodes:
            raise InputError(f"tree: path {node} lacks its sibling {elder}; a node's children have ranks 0, 1, ...")
    children = dict.fromkeys([(), *sorted(nodes, key=_level_order)], 0)
    for node in nodes:
        children[node[:-1]] += 1
    return tuple(children.values())


def to_paths(shape: Shape) -> list[Path]:
    """List the paths of all nodes except the root, in level order (MEDUSA's choices)."""
    found: list[Path] = [()]
    for node, count in enumerate(shape):
        found += [(*found[node], rank) for rank in range(count)]
    return found[1:]


def parents(shape: Shape) -> Ints:
    """Parent of every node [n + 1]; -1 for the root."""
    return np.concatenate([[-1], np.repeat(np.arange(len(shape)), shape)]).astype(np.int64)


def ranks(shape: Shape) -> Ints:
    """Rank of every node among its siblings [n + 1]; 0 for the root."""
    return np.concatenate([[0], *(np.arange(count) for count in shape)]).astype(np.int64)


def depths(shape: Shape) -> Ints:
    """Depth of every node [n + 1]; 0 for the root."""
    found = np.zeros(len(shape), dtype=np.int64)
    for node, parent in enumerate(parents(shape).tolist()[1:], start=1):
        found[node] = found[parent] + 1
    return found


def cut(shape: Shape, depth: int) -> Shape:
    """Drop the nodes below this depth."""
    at = depths(shape)
    return tuple(np.where(at < depth, shape, 0)[at <= depth].tolist())


@cache
def vct(width: int, depth: int, level_nodes: int) -> Shape:
    """Vanilla candidate tree: every node has `width` children down to `depth`, a level at most `level_nodes` nodes.

    Of a wider level those nodes are kept whose ranks, from the root on, have the least sum,
    earlier ones first among equals: the likeliest, as far as that shows without probabilities.
    EDD + PCT (appendix) sets width 3 and depth 5 and does not say whether levels are capped:
    the full tree has 363 nodes, too many for the printed speedup.
    """
    level: list[Path] = [()]
    nodes: list[Path] = []
    for _ in range(depth):
        offspring = [(*node, rank) for node in level for rank in range(width)]
        level = sorted(sorted(offspring, key=sum)[:level_nodes])
        nodes += level
    return from_paths(nodes)


@cache
def cartesian(sizes: tuple[int, ...]) -> Shape:
    """MEDUSA's dense tree (section 3.1.2): every node of depth k - 1 has sizes[k - 1] children; a size of 0 ends it."""
    shape, level = [], 1
    for size in itertools.takewhile(bool, sizes):
        shape += [size] * level
        level *= size
    return tuple(shape + [0] * level)


def accepted_tokens(shape: Shape, true_rank: npt.NDArray[np.integer]) -> Ints:
    """Tokens [N] that a static tree gets accepted in a round at each position.

    true_rank : [N, D], the rank of the target's own token at each depth, -1 beyond the output
    """
    children = np.array(shape)
    first_child = 1 + np.concatenate([[0], np.cumsum(children)[:-1]])
    node = np.zeros(len(true_rank), dtype=np.int64)
    accepted = np.zeros(len(true_rank), dtype=np.int64)
    alive = np.ones(len(true_rank), dtype=bool)
    for rank in true_rank.T.astype(np.int64):
        alive = alive & (rank >= 0) & (rank < children[node])
        node = np.where(alive, first_child[node] + rank, node)
        accepted += alive
    return accepted


def _level_order(path: Path) -> tuple[int, Path]:
    return len(path), path
