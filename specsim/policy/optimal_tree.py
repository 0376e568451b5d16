"""OptimalTree: the static tree that decodes fastest, by the rates of a trace and the costs of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from specsim.policy.base import Variant, build_policy, setting
from specsim.policy.sparse_tree import LearnedTree
from specsim.policy.tree import MAX_DRAFTED
from specsim.tree_search import rates_of

if TYPE_CHECKING:
    from specsim.cost import CostTable
    from specsim.trace import Trace


@dataclass(frozen=True)
class OptimalTree(LearnedTree):
    """Sequoia's hardware-aware tree: most expected tokens per second over all sizes and depths.

    `fit` counts the rates on a trace and prices the rounds by its costs (`specsim.tree_optimal`).
    Nothing is left to tune.
    """

    max_nodes: int = setting(64, 1, MAX_DRAFTED, doc="most nodes of the tree that is learned")
    max_depth: int = setting(16, 1, 255, doc="deepest nodes of the tree that is learned, in tokens")

    name = "optimal_tree"
    source = "Sequoia, Chen et al. 2024, arXiv:2402.12374, with widths of draft passes priced too"
    variants = (Variant("fitted", tuned=False),)

    @classmethod
    def fit(cls, settings: Mapping[str, Any], train: Trace, table: CostTable) -> Self:
        from specsim.tree_optimal import optimal_tree, tree_round_cost

        given = build_policy(cls, settings)
        if "children" in settings:
            return given
        cost = tree_round_cost(table, train)
        best = optimal_tree(rates_of(train), cost, max_nodes=given.max_nodes, max_depth=given.max_depth)
        return build_policy(cls, {**settings, "children": tuple(map(float, best.shape))})
