"""SparseTree: the static tree of a given size that gets most tokens accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from specsim.errors import InputError
from specsim.policy.base import build_policy, setting
from specsim.policy.static_tree import StaticTree, check_shape
from specsim.policy.tree import MAX_DRAFTED
from specsim.tree_search import best_trees, rates_of
from specsim.tree_shapes import cut

if TYPE_CHECKING:
    from specsim.cost import CostTable
    from specsim.trace import Trace

NODES = 63  # with the root 64, and 4 deep, as the tree that MEDUSA shows
ROUGH_RATES = np.outer(0.9 ** np.arange(4), 0.6 * 0.3 ** np.arange(10))  # of a fair drafter
ROUGH_TREE = tuple(map(float, best_trees(ROUGH_RATES, NODES).shape(NODES)))


@dataclass(frozen=True)
class LearnedTree(StaticTree):
    """Base of static trees that `fit` learns, unless they are given. The default comes from no fit."""

    children: tuple[float, ...] = setting(
        ROUGH_TREE, 0, MAX_DRAFTED, doc="learned: children of every node in level order, the root first"
    )

    max_depth: int = setting(16, 1, 255, tune=(1, 16), doc="deepest nodes of the tree, in tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(count != int(count) for count in self.children):
            raise InputError(f"policy {self.name}: children has a count that is no whole number; give whole ones")
        check_shape(self.name, tuple(map(int, self.children)))

    @property
    def shape(self) -> tuple[int, ...]:
        return cut(tuple(map(int, self.children)), self.max_depth)


@dataclass(frozen=True)
class SparseTree(LearnedTree):
    """MEDUSA's sparse tree: the likeliest nodes, by how often each rank is right at each depth.

    `fit` counts the rates on a trace and takes the best tree of `nodes` nodes (`specsim.tree_search`).
    """

    nodes: int = setting(NODES, 1, MAX_DRAFTED, tune=(1, 64), log=True, doc="nodes of the tree that is learned")

    name = "sparse_tree"
    source = "MEDUSA, section 3.3.3; rates by depth given the path so far, as Sequoia (arXiv:2402.12374)"

    @classmethod
    def fit(cls, settings: Mapping[str, Any], train: Trace, table: CostTable) -> Self:
        given = build_policy(cls, settings)
        if "children" in settings:
            return given
        found = best_trees(rates_of(train)[: given.max_depth], given.nodes)
        return build_policy(cls, {**settings, "children": tuple(map(float, found.shape(found.nodes)))})
