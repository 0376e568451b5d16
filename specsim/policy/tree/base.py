"""Interface of tree policies: which nodes of a draft tree get children, and which are verified.

A tree grows level by level, with a draft pass for each level with an expanded node. Node
0 is the root, the pending token; drafted nodes follow in level order: by depth, by parent, and
siblings by rank, their place in the order in which the drafter drafts them. The compiled
functions, shared by replay and real run:

    initial_state(params) -> state
    expand(state, params, tree, first, end, u, widths) -> state
    select(state, params, tree, count, keep) -> floor
    update(state, params, depth, accepted) -> state

`expand` is asked about the newest level, nodes first .. end - 1 (at first the root alone), and
writes into widths, int32 and zero before, how many children each of them gets; none at all
ends the tree. `u` is a uniform in (0, 1) of this place alone. `select` sees the drafted tree of
`count` nodes and sets keep[i] for those to verify; a node whose parent is not kept is
dropped. It returns the floor: a node of a smaller path probability would neither have been kept
nor changed what is drafted and kept (infinite where all goes by rank alone). `update` sees the depth of the
verified tree and the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats
from specsim.policy.base import Policy

UNKNOWN = -1.0  # path and prob of a drafted node that the trace does not hold; in replays only
MAX_DRAFTED = 1023  # nodes that a tree can have; nothing is expanded beyond


class Tree(NamedTuple):
    """Arrays over nodes, filled as far as the tree is drafted.

    path, prob : float32, path probability (1 at the root) and the node's own, given its parent
    parent, rank, depth : int32
    value : float64, the policy's own number of each node, such as a calibrated path probability
    score : float64, over drafted levels: the acceptance predictor's score of the first candidates' chain (each node the
        likeliest child of its parent), or of its last expanded node if the chain has ended.
        Only where the policy names the feature "score"
    """

    path: npt.NDArray[np.float32]
    prob: npt.NDArray[np.float32]
    parent: npt.NDArray[np.int32]
    rank: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    value: Floats
    score: Floats


@dataclass(frozen=True)
class TreePolicy(Policy):
    """Base of every tree policy: which nodes to expand, and which to verify.

    A policy is a frozen dataclass of `setting` fields with the compiled functions that the head of this file
    describes, and has settings or properties `max_depth` (tokens) and `max_nodes`.

    Examples
    --------
    >>> import specsim
    >>> issubclass(specsim.policies()["eagle2"], specsim.TreePolicy)
    True
    """

    features: ClassVar[tuple[str, ...]] = ("true_rank", "tree")
    static: ClassVar[bool] = False  # the tree is known beforehand; see `specsim.policy.tree.static`
    functions = ("initial_state", "expand", "select", "update")
    expand: ClassVar[Callable[..., Any]]
    select: ClassVar[Callable[..., Any]]

    @property
    def max_draft_tokens(self) -> int:
        return int(self.max_depth)  # type: ignore[attr-defined]

    @property
    def max_verified_nodes(self) -> int:
        """Most nodes verified in a round, the pending token not counted."""
        return int(self.max_nodes)  # type: ignore[attr-defined]

    @property
    def max_expanded(self) -> int:
        """Most expanded nodes of a level."""
        return self.max_verified_nodes

    @property
    def max_width(self) -> int:
        """Most children of a node."""
        raise NotImplementedError


def new_tree() -> Tree:
    """Room for the largest tree, with the root in it."""
    room = MAX_DRAFTED + 1
    tree = Tree(
        path=np.zeros(room, dtype=np.float32),
        prob=np.zeros(room, dtype=np.float32),
        parent=np.zeros(room, dtype=np.int32),
        rank=np.zeros(room, dtype=np.int32),
        depth=np.zeros(room, dtype=np.int32),
        value=np.zeros(room),
        score=np.zeros(room),
    )
    tree.path[0] = tree.prob[0] = 1.0
    tree.parent[0] = -1
    return tree


@nb.njit
def limit_widths(widths, first, end, room):  # type: ignore[no-untyped-def]
    """Cut the widths of a level to what the tree has room for; (nodes drafted, nodes expanded) of the level."""
    drafted = expanded = 0
    for i in range(first, end):
        widths[i] = min(max(widths[i], 0), room - drafted)
        drafted += widths[i]
        if widths[i] > 0:
            expanded += 1
    return drafted, expanded


@nb.njit
def close_kept(tree, count, keep):  # type: ignore[no-untyped-def]
    """Drop kept nodes whose parent is not kept; (nodes kept beside the root, depth of the deepest)."""
    kept = last = 0
    for i in range(1, count):  # without branches, which would be guessed wrong at every other node
        keep[i] &= keep[tree.parent[i]]
        kept += keep[i]
        last = i if keep[i] else last
    return kept, tree.depth[last]
