"""When to stop drafting a tree, and what a node is worth: the learning behind `HardwarePCT`.

As for chains (`specsim.stopping`), rounds renew: the time per token is the least if every round
maximises value x tokens - seconds, the value of a token being that least time per token. The
tree after each level is worth the best of all choices of nodes to verify. Whether one level more
pays is a problem of optimal stopping whose state is a whole tree. It is solved by regression
(Longstaff and Schwartz 2001): backward over the depth, what drafting on brings, by the
rules already learned for later levels, is fitted to one number that is known before the
pass, the sum of what the children of the level's nodes are expected to be worth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.cost import CostTable
from specsim.errors import InputError
from specsim.policy.tree_worth import KNOTS, LOWEST, NEVER, worth_of_children
from specsim.replay import context_share
from specsim.trace import Trace
from specsim.tree_calibration import Floats, Rounds

BINS = 6  # of a node's own chance


@dataclass(frozen=True)
class TreeCost:
    """Seconds of a round's parts at an average context.

    pass_s [D] : a draft pass that expands one node of depth d = 0 .. D - 1
    wider_s [E + 1] : what it takes more over e nodes
    verify_s [n + 1] : a pass over n nodes beside the pending token
    """

    pass_s: Floats
    wider_s: Floats
    verify_s: Floats
    policy_step_s: float


def mean_tree_cost(trace: Trace, table: CostTable, *, max_nodes: int, max_expanded: int) -> TreeCost:
    """The costs of a table averaged over the contexts of a trace's positions; InputError if it does not cover them."""
    if table.tree is None or len(table.tree.verify_s) < max_nodes + 2:
        covered = len(table.tree.verify_s) - 1 if table.tree else 0
        raise InputError(
            f"costs cover trees of up to {covered} tokens, hardware_pct may need {max_nodes + 1}; lower max_nodes or "
            "profile with a larger `--tree-tokens`"
        )
    share = context_share(trace, table)
    return TreeCost(
        pass_s=np.diff(table.draft_s @ share),
        wider_s=np.nan_to_num(table.tree.wider_s[: max_expanded + 1]) @ share,
        verify_s=table.tree.verify_s[1 : max_nodes + 2] @ share,
        policy_step_s=table.tree.policy_step_s,
    )


def children_gains(
    trace: Trace,
    rounds: Rounds,
    values: Floats,
    *,
    max_depth: int,
    width: int,
    least: float,
    value_s: float,
    margin_s: float,
) -> tuple[Floats, Floats]:
    """Edges between own chances and gains [bins, KNOTS] in seconds per path probability, rising with it (isotonic)."""
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it

    assert trace.tree is not None
    at, own, worth = worth_of_children(
        rounds.rows, trace.tree.first_child, values, max_depth, width, least, value_s, margin_s
    )
    edges = np.unique(np.quantile(own, np.linspace(0, 1, BINS + 1)[1:-1])) if len(own) else np.array([0.5])
    knots = np.linspace(LOWEST, 0.0, KNOTS)
    row = np.searchsorted(edges, own, side="right")
    gains = np.zeros((len(edges) + 1, KNOTS))
    for b in range(len(gains)):
        if (row == b).any():
            fit = IsotonicRegression(y_min=0.0, out_of_bounds="clip").fit(at[row == b], worth[row == b])
            gains[b] = fit.predict(knots)
    return edges, gains


def least_gains(foretold_s: Floats, wide_s: Floats, worth_s: Floats, cost: TreeCost) -> Floats:
    """What a level's children must at least be expected to be worth for the pass to pay, per depth [D], in seconds.

    The arrays are those of `levels`.
    """
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it

    depths = foretold_s.shape[1]
    limits = np.full(depths, NEVER)
    ahead_s = worth_s[:, depths]
    for d in range(depths - 1, -1, -1):
        asked_s = cost.policy_step_s if d + 1 < depths else 0.0
        on_s = ahead_s - cost.pass_s[d] - wide_s[:, d] - asked_s
        if d == 0:
            limits[0] = 0.0 if on_s.mean() > worth_s[:, 0].mean() else NEVER
            break
        open_rounds = foretold_s[:, d] > 0.0
        if open_rounds.any():
            x, y = foretold_s[open_rounds, d], (on_s - worth_s[:, d])[open_rounds]
            fit = IsotonicRegression().fit(x, y)
            paying = fit.y_thresholds_ > 0.0
            if paying.any():
                first = int(paying.argmax())
                limits[d] = fit.X_thresholds_[first - 1 : first + 1].mean() if first else 0.0
        ahead_s = np.where(open_rounds & (foretold_s[:, d] >= limits[d]), on_s, worth_s[:, d])
    return limits
