"""Fit policies to a trace and its costs; static trees by the trace's acceptance rates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from specsim.learn.renewal_stop import fit_renewal_stop
from specsim.policy.base import Policy, Settings, build_policy
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.policy.static_tree.rates import rates_of
from specsim.policy.static_tree.search import best_trees
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.sparse_tree import SparseTree

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace


def fit_sparse_tree(kind: type[SparseTree], settings: Settings, train: Trace, table: CostTable) -> SparseTree:
    """Choose the children of each node with the largest expected number of accepted tokens, unless they are given."""
    policy = build_policy(kind, settings)
    if "children" in settings:
        return policy
    trees = best_trees(rates_of(train)[: policy.max_depth], policy.nodes)
    return build_policy(kind, {**settings, "children": tuple(map(float, trees.shape(trees.nodes)))})


def fit_optimal_tree(kind: type[OptimalTree], settings: Settings, train: Trace, table: CostTable) -> OptimalTree:
    """Choose the children of each node with the largest expected speedup, unless they are given."""
    from specsim.policy.static_tree.optimal import optimal_tree, tree_round_cost

    policy = build_policy(kind, settings)
    if "children" in settings:
        return policy
    cost = tree_round_cost(table, train)
    best = optimal_tree(rates_of(train), cost, max_nodes=policy.max_nodes, max_depth=policy.max_depth)
    return build_policy(kind, {**settings, "children": tuple(map(float, best.shape))})


P = TypeVar("P", bound=Policy)
FITTERS: dict[type[Policy], Callable[..., Any]] = {
    RenewalStop: fit_renewal_stop,
    SparseTree: fit_sparse_tree,
    OptimalTree: fit_optimal_tree,
}


def fit(kind: type[P], settings: Settings, train: Trace, table: CostTable) -> P:
    """Create a policy with these settings, and fit the others to `train` under `table` if it has a fit.

    Settings that are given are not fitted.
    """
    fitter = next((FITTERS[base] for base in kind.__mro__ if base in FITTERS), None)
    policy: P = kind.fit(settings, train, table) if fitter is None else fitter(kind, settings, train, table)
    return policy


def needs_fitting(kind: type[Policy]) -> bool:
    """Tell whether policies of this kind are fitted to data or costs."""
    own = inspect.getattr_static(kind, "fit") is not inspect.getattr_static(Policy, "fit")
    return own or any(base in FITTERS for base in kind.__mro__)


def is_fitted(policy: Policy, given: Settings, trace: Trace, table: CostTable) -> bool:
    """Tell whether fitting with these given settings would leave the policy unchanged."""
    return not needs_fitting(type(policy)) or fit(type(policy), given, trace, table) == policy
