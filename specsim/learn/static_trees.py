"""Fit of static trees to a trace's acceptance rates: MEDUSA's sparse tree and the optimal tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specsim.policy.base import build_policy
from specsim.policy.static_tree.rates import rates_of
from specsim.policy.static_tree.search import best_trees
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.sparse_tree import SparseTree

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace


def fit_sparse_tree(kind: type[SparseTree], settings: Mapping[str, Any], train: Trace, table: CostTable) -> SparseTree:
    """Choose the children of each node with the largest expected number of accepted tokens, unless they are given."""
    policy = build_policy(kind, settings)
    if "children" in settings:
        return policy
    trees = best_trees(rates_of(train)[: policy.max_depth], policy.nodes)
    return build_policy(kind, {**settings, "children": tuple(map(float, trees.shape(trees.nodes)))})


def fit_optimal_tree(
    kind: type[OptimalTree], settings: Mapping[str, Any], train: Trace, table: CostTable
) -> OptimalTree:
    """Choose the children of each node with the largest expected speedup, unless they are given."""
    from specsim.policy.static_tree.optimal import optimal_tree, tree_round_cost

    policy = build_policy(kind, settings)
    if "children" in settings:
        return policy
    cost = tree_round_cost(table, train)
    best = optimal_tree(rates_of(train), cost, max_nodes=policy.max_nodes, max_depth=policy.max_depth)
    return build_policy(kind, {**settings, "children": tuple(map(float, best.shape))})
