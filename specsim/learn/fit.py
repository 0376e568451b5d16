"""Fit policies to a trace and its costs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from specsim.learn.renewal_stop import fit_renewal_stop
from specsim.learn.static_trees import fit_optimal_tree, fit_sparse_tree
from specsim.policy.base import Policy
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.sparse_tree import SparseTree

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace

P = TypeVar("P", bound=Policy)
FITTERS: dict[type[Policy], Callable[..., Any]] = {
    RenewalStop: fit_renewal_stop,
    SparseTree: fit_sparse_tree,
    OptimalTree: fit_optimal_tree,
}


def fit(kind: type[P], settings: Mapping[str, Any], train: Trace, table: CostTable) -> P:
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


def is_fitted(policy: Policy, given: Mapping[str, Any], trace: Trace, table: CostTable) -> bool:
    """Tell whether fitting with these given settings would leave the policy unchanged."""
    return not needs_fitting(type(policy)) or fit(type(policy), given, trace, table) == policy
