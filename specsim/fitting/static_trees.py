"""Learning static trees: MEDUSA's sparse tree and the optimal tree, from a trace's acceptance rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specsim.policy.base import build_policy
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.static_tree.rates import rates_of
from specsim.static_tree.search import best_trees

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace


def fit_sparse_tree(kind: type[SparseTree], settings: Mapping[str, Any], train: Trace, table: CostTable) -> SparseTree:
    given = build_policy(kind, settings)
    if "children" in settings:
        return given
    found = best_trees(rates_of(train)[: given.max_depth], given.nodes)
    return build_policy(kind, {**settings, "children": tuple(map(float, found.shape(found.nodes)))})


def fit_optimal_tree(
    kind: type[OptimalTree], settings: Mapping[str, Any], train: Trace, table: CostTable
) -> OptimalTree:
    from specsim.static_tree.optimal import optimal_tree, tree_round_cost

    given = build_policy(kind, settings)
    if "children" in settings:
        return given
    cost = tree_round_cost(table, train)
    best = optimal_tree(rates_of(train), cost, max_nodes=given.max_nodes, max_depth=given.max_depth)
    return build_policy(kind, {**settings, "children": tuple(map(float, best.shape))})
