"""Optimal stopping of a draft tree, and values of its nodes: the fit of `HardwarePCT`.

As for chains (`specsim.learn.chain_stopping`), rounds are renewals: the time per token is smallest if every round
maximises value x tokens - seconds, where the value of a token is that smallest time per token. The value of the
tree after each level is that of its best choice of nodes to verify. Whether another level pays is a problem of optimal
stopping whose state is a whole tree. Regression solves it (Longstaff and Schwartz 2001): backward over the depth, the
gain of drafting on, by the rules already fitted for later levels, is fitted to a number that is known before the pass:
the sum of the expected values of the children of the level's nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numba as nb
import numpy as np

from specsim.cost.table import CostTable, context_share
from specsim.io.arrays import Floats, IntArray
from specsim.io.errors import InputError
from specsim.policy.estimates.node_value import KNOTS, LOWEST, NEVER, best_expanded, best_kept, descending, gain_s
from specsim.trace.trace import Trace

BINS = 6  # of a node's own probability


@dataclass(frozen=True)
class TreeCost:
    """Seconds of a round's parts at an average context.

    pass_s [D] : a draft pass that expands a node of depth d = 0 .. D - 1
    extra_nodes_s [E + 1] : its extra time over e nodes
    verify_s [n + 1] : a target pass over n nodes and the pending token
    """

    pass_s: Floats
    extra_nodes_s: Floats
    verify_s: Floats
    policy_step_s: float


def mean_tree_cost(trace: Trace, table: CostTable, *, max_nodes: int, max_expanded: int) -> TreeCost:
    """Average the costs of a table over the contexts of a trace's positions; InputError if it has too few nodes."""
    if table.tree is None or len(table.tree.verify_s) < max_nodes + 2:
        covered = len(table.tree.verify_s) - 1 if table.tree else 0
        raise InputError(
            f"costs cover trees of up to {covered} tokens, hardware_pct may need {max_nodes + 1}; lower max_nodes or "
            "profile with a larger `realrun profile --tree-nodes`"
        )
    share = context_share(trace, table)
    return TreeCost(
        pass_s=np.diff(table.draft_s @ share),
        extra_nodes_s=np.nan_to_num(table.tree.wider_s[: max_expanded + 1]) @ share,
        verify_s=table.tree.verify_s[1 : max_nodes + 2] @ share,
        policy_step_s=table.tree.policy_step_s,
    )


class RecordedTrees(NamedTuple):
    """Recorded trees at which rounds start.

    rows : int [R], of the trace
    first_child : [N, M + 2], of every node of every recorded tree
    values : float64 [R, M + 1], calibrated path probability of every node, column 0 the root
    """

    rows: IntArray
    first_child: IntArray
    values: Floats


class DraftLimits(NamedTuple):
    """Deepest and widest drafts, and the least path probability at which a node is expanded."""

    max_depth: int
    width: int
    min_path_prob: float


def children_gains(
    recorded: RecordedTrees, limits: DraftLimits, time_per_token_s: float, margin_s: float
) -> tuple[Floats, Floats]:
    """Bin edges of own probabilities, and isotonic gains [bins, KNOTS] in seconds per path probability."""
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it

    log_path, own, gain = value_of_children(recorded, limits, time_per_token_s, margin_s)
    edges = np.unique(np.quantile(own, np.linspace(0, 1, BINS + 1)[1:-1])) if len(own) else np.array([0.5])
    knots = np.linspace(LOWEST, 0.0, KNOTS)
    row = np.searchsorted(edges, own, side="right")
    gains = np.zeros((len(edges) + 1, KNOTS))
    for b in range(len(gains)):
        if (row == b).any():
            fit = IsotonicRegression(y_min=0.0, out_of_bounds="clip").fit(log_path[row == b], gain[row == b])
            gains[b] = fit.predict(knots)
    return edges, gains


def min_gains(predicted_gain_s: Floats, extra_s: Floats, best_value_s: Floats, cost: TreeCost) -> Floats:
    """Smallest expected value of a level's children at which the pass pays, per depth [D], in seconds.

    The arrays are those of `levels`.
    """
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it

    depths = predicted_gain_s.shape[1]
    limits = np.full(depths, NEVER)
    ahead_s = best_value_s[:, depths]
    for d in range(depths - 1, -1, -1):
        asked_s = cost.policy_step_s if d + 1 < depths else 0.0
        on_s = ahead_s - cost.pass_s[d] - extra_s[:, d] - asked_s
        if d == 0:
            limits[0] = 0.0 if on_s.mean() > best_value_s[:, 0].mean() else NEVER
            break
        open_rounds = predicted_gain_s[:, d] > 0.0
        if open_rounds.any():
            x, y = predicted_gain_s[open_rounds, d], (on_s - best_value_s[:, d])[open_rounds]
            fit = IsotonicRegression().fit(x, y)
            paying = fit.y_thresholds_ > 0.0
            if paying.any():
                first = int(paying.argmax())
                limits[d] = fit.X_thresholds_[first - 1 : first + 1].mean() if first else 0.0
        ahead_s = np.where(open_rounds & (predicted_gain_s[:, d] >= limits[d]), on_s, best_value_s[:, d])
    return limits


@nb.njit(cache=True)
def value_of_children(recorded, limits, time_per_token_s, margin_s):  # type: ignore[no-untyped-def]
    """Value of the children of every recorded node that might be expanded.

    Returns log path probability, own probability, and sum over the children of (value x path
    probability - margin_s)+ per path probability of the node, [n] each.
    """
    rows, first_child, values = recorded
    depths, width, min_path_prob = limits
    n = 0
    for filling in (False, True):  # the first pass counts
        log_path, own, gain = np.empty(n), np.empty(n), np.empty(n)
        n = 0
        level, parent = np.zeros(values.shape[1], np.int64), np.zeros(values.shape[1], np.int64)
        for r in range(len(rows)):
            for node in range(values.shape[1]):
                begin, end = np.int64(first_child[rows[r], node]), np.int64(first_child[rows[r], node + 1])
                for child in range(begin, end):
                    level[child], parent[child] = level[node] + 1, node
                path = values[r, node]
                if node == 0 or path < min_path_prob or level[node] >= depths:
                    continue
                if filling:
                    total = 0.0
                    for child in range(begin, min(end, begin + width)):
                        total += max(time_per_token_s * values[r, child] - margin_s, 0.0)
                    log_path[n], own[n], gain[n] = math.log(path), path / values[r, parent[node]], total / path
                n += 1
    return log_path, own, gain


@nb.njit(cache=True)
def levels(recorded, limits, time_per_token_s, verify_s, extra_nodes_s, edges, gains):  # type: ignore[no-untyped-def]
    """Grow every round's tree level by level, as far as recorded.

    Returns, per round and depth d = 0 .. D, predicted_gain_s [R, D], expected value of the children of the nodes of
    depth d, net of the wider pass; extra_s [R, D], seconds of that pass beyond those of a pass over a single node; and
    best_value_s [R, D + 1], value of verifying the best of the nodes up to depth d.
    """
    rows, first_child, values = recorded
    depths, width, min_path_prob = limits
    nodes = values.shape[1]
    predicted_gain_s, extra_s = np.zeros((len(rows), depths)), np.zeros((len(rows), depths))
    best_value_s = np.zeros((len(rows), depths + 1))
    parent = np.zeros(nodes, np.int64)
    here, likely = np.zeros(nodes), np.zeros(nodes)
    for r in range(len(rows)):
        row = rows[r]
        count, first, end = 0, 0, 1  # likely nodes so far; nodes of this level
        for d in range(depths + 1):
            begun = 0
            for node in range(first, end):
                drafted = node - np.int64(first_child[row, parent[node]]) < width
                if node > 0 and drafted and values[r, parent[node]] >= min_path_prob:
                    likely[count] = values[r, node]
                    count += 1
                if node == 0 or d == depths or not drafted or values[r, node] < min_path_prob:
                    continue
                here[begun] = gain_s(values[r, node], values[r, node] / values[r, parent[node]], edges, gains)
                begun += 1
            values_here = likely[:count][descending(likely[:count])]
            best_value_s[r, d] = best_kept(values_here, time_per_token_s, verify_s)[1]
            if d == depths:
                break
            expanded, total = best_expanded(here[:begun][descending(here[:begun])], extra_nodes_s)
            predicted_gain_s[r, d] = total
            extra_s[r, d] = extra_nodes_s[expanded] if expanded > 0 else 0.0
            last = end
            for node in range(first, last):
                for child in range(np.int64(first_child[row, node]), np.int64(first_child[row, node + 1])):
                    parent[child] = node
                    end = child + 1
            first = last
    return predicted_gain_s, extra_s, best_value_s
