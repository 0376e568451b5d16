"""HardwarePCT: a pruned candidate tree whose nodes are worth what tokens cost on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb
import numpy as np

from specsim.io.errors import InputError
from specsim.policy.base import Variant, setting
from specsim.policy.estimates.node_probability import (
    FEATURES,
    accept_prob,
    min_draft_prob,
    recent_after,
    shared_score,
    value,
)
from specsim.policy.estimates.node_value import (
    KNOTS,
    NEVER,
    best_expanded,
    best_kept,
    descending,
    gain_s,
    irrelevance_bound,
    min_useful_path_prob,
)
from specsim.policy.tree.base import UNKNOWN, TreePolicy
from specsim.policy.tree.expansion import nth_best

ODDS_ACCEPT_PROBS = tuple(1 / (1 + math.exp(-i / 4)) for i in range(-32, 33))
MARGIN = 1.0 - 1e-6  # on the floor, for rounding


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (params.mean_accepted, 0.0)  # running mean of accepted tokens, nodes whose value is set


@nb.njit
def set_values(state, params, tree, end):  # type: ignore[no-untyped-def]
    """Calibrated path probabilities of the nodes up to `end` that have none yet."""
    weights, accept_probs, scale, power = params.weights, params.accept_probs, params.scale, params.power
    tree.value[0] = 1.0
    parent, shared = -1, 0.0
    for i in range(max(int(state[1]), 1), end):
        if tree.path[i] < 0.0:
            tree.value[i] = UNKNOWN
            continue
        if tree.parent[i] != parent:
            parent = tree.parent[i]
            shared = shared_score(weights, tree.depth[i], np.float64(tree.path[parent]), state[0])
        likely = accept_prob(shared, weights, accept_probs, np.float64(tree.prob[i]), tree.rank[i])
        tree.value[i] = value(tree.value[parent], likely, np.float64(tree.path[i]), scale, power)


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    valued = (state[0], 0.0 if first == 0 else state[1])
    set_values(valued, params, tree, end)
    done = (state[0], float(end))
    min_path_prob, width = params.min_path_prob, int(params.width)
    limits = params.min_gain_s
    limit = limits[min(tree.depth[first], len(limits) - 1)]
    if first == 0:
        if limit < NEVER:
            widths[0] = width
        return done
    count = 0
    for i in range(first, end):
        count += tree.value[i] >= min_path_prob
    if count == 0:
        return done
    nodes, gains = np.empty(count, np.int64), np.empty(count)
    count = 0
    for i in range(first, end):
        if tree.value[i] >= min_path_prob:
            nodes[count] = i
            own = tree.value[i] / tree.value[tree.parent[i]]
            gains[count] = gain_s(tree.value[i], own, params.edges, params.gains)
            count += 1
    order = descending(gains)
    expanded, total = best_expanded(gains[order], params.extra_nodes_s)
    if expanded > 0 and total >= limit:
        for i in range(expanded):
            widths[nodes[order[i]]] = width
    return done


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    set_values(state, params, tree, count)
    time_per_token_s, most = params.time_per_token_s, int(params.max_nodes)
    verify_s = params.verify_s[: most + 1]
    least = nth_best(tree.value, 1, count, most, np.empty(most))
    likely = np.empty(count)
    n, unknown = 0, False
    for i in range(1, count):
        if tree.value[i] >= max(least, 0.0):
            likely[n] = tree.value[i]
            n += 1
        unknown |= tree.value[i] < 0.0
    likely = likely[:n]
    values = likely[descending(likely)][:most]
    kept, _ = best_kept(values, time_per_token_s, verify_s)
    if kept > 0:
        lowest, ties = values[kept - 1], kept
        for i in range(1, count):
            if tree.value[i] > lowest:
                keep[i] = True
                ties -= 1
        for i in range(1, count):
            if tree.value[i] == lowest and ties > 0:
                keep[i] = True
                ties -= 1
    if not unknown:
        return np.inf
    # Neither expanded, nor kept, nor in the way of others.
    small = min(
        max(params.min_path_prob, min_useful_path_prob(params.gains)),
        irrelevance_bound(values, kept, time_per_token_s, verify_s),
    )
    return MARGIN * least_unknown_path(state, params, tree, count, small)


@nb.njit
def least_unknown_path(state, params, tree, count, small):  # type: ignore[no-untyped-def]
    """Draft path probability that an UNKNOWN node needs for a calibrated probability of at least `small`.

    The least over the first unknown child of every known node: what is below is no likelier.
    """
    weights, accept_probs = params.weights, params.accept_probs
    ceiling = (small / params.scale) ** (1.0 / params.power)
    least = np.inf
    for i in range(1, count):
        parent = tree.parent[i]
        first = tree.path[i] < 0.0 and (tree.parent[i - 1] != parent or tree.path[i - 1] >= 0.0)
        if first and tree.path[parent] >= 0.0 and tree.value[parent] >= small:
            path = np.float64(tree.path[parent])
            shared = shared_score(weights, tree.depth[i], path, state[0])
            prob = min_draft_prob(shared, weights, accept_probs, tree.rank[i], small / tree.value[parent])
            if prob <= 1.0:
                least = min(least, prob * path)
    return max(least, ceiling)


@nb.njit
def update(state, params, depth, accepted):  # type: ignore[no-untyped-def]
    return (recent_after(state[0], accepted), 0.0)


@dataclass(frozen=True)
class HardwarePCT(TreePolicy):
    """Expand and keep a node iff it is worth more than it costs here, a token being worth what it costs on average.

    The probability that a node's whole path is accepted is calibrated from the draft probability, its
    rank and depth, the parent's path, and how much was accepted lately. Of the drafted nodes, the
    likeliest n are verified, with the n for which value x tokens - seconds of the pass is the
    largest. A level is expanded where its likely nodes' children are expected to be worth more,
    net of their verification and of a wider draft pass, than the least for that depth; that least
    looks ahead: a pass may pay through the levels after it. `fit` learns all that from a trace
    and its costs (`specsim.learn.tree_stopping`), from rounds that the policy itself starts.

    With `gains` given, nothing is learned. Bounds not given are lowered to what trace and costs
    hold. The defaults come from no fit: draft probabilities as
    they are, and costs in units of a target pass on a machine where a draft step takes a twentieth
    of it, and a token more a two-hundredth.
    """

    width: int = setting(8, 1, 32, bounds="width", doc="children of an expanded node")
    max_depth: int = setting(10, 1, 64, bounds="depth", doc="most levels of the tree")
    max_nodes: int = setting(64, 1, 255, bounds="nodes", doc="most nodes verified in a round")
    min_path_prob: float = setting(0.01, 0.001, 1.0, log=True, doc="path probability below which no node is expanded")
    calibration: str = setting("platt", choices=("platt", "isotonic"), doc="how probabilities are fitted")
    time_per_token_s: float = setting(0.4, 0.0, 1e6, doc="learned: value of a token in seconds, the time per token")
    weights: tuple[float, ...] = setting((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), -1e9, 1e9, doc="learned: score of a node")
    accept_probs: tuple[float, ...] = setting(
        ODDS_ACCEPT_PROBS, 0.0, 1.0, doc="learned: probability of a node, at even scores"
    )
    scale: float = setting(1.0, 1e-9, 1e9, doc="learned: ceiling of a path probability, scale x draft path ^ power")
    power: float = setting(1.0, 1e-3, 1.0, doc="learned: see scale")
    mean_accepted: float = setting(2.0, 0.0, 1e6, doc="learned: accepted tokens of a round, where a sequence starts")
    edges: tuple[float, ...] = setting((0.5,), 0.0, 1.0, doc="learned: own probabilities between rows of gains")
    gains: tuple[float, ...] = setting((0.3,) * 2 * KNOTS, 0.0, 1e6, doc="learned: value of a node's children")
    min_gain_s: tuple[float, ...] = setting((0.0, 0.05), 0.0, NEVER, doc="learned: least gain of a pass, per depth")
    extra_nodes_s: tuple[float, ...] = setting(
        (0.0,) * 33, -1e6, 1e6, doc="learned: a draft pass over more nodes than one"
    )
    verify_s: tuple[float, ...] = setting(
        tuple(1 + n / 200 for n in range(256)), 0.0, 1e6, doc="learned: a pass over more nodes than the pending token"
    )

    name = "hardware_pct"
    source = (
        "EDD + PCT (Eq. 5) as renewal reward with calibrated probabilities and profiled costs, fitting/tree_stopping.py"
    )
    variants = (Variant("fitted", tuned=False),)
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ok, wanted in (
            ("weights", len(self.weights) == 1 + FEATURES, f"{1 + FEATURES} numbers"),
            ("accept_probs", len(self.accept_probs) > 1, "at least two numbers"),
            ("edges", list(self.edges) == sorted(set(self.edges)), "increasing numbers"),
            ("gains", len(self.gains) == (len(self.edges) + 1) * KNOTS, f"{KNOTS} numbers per range of own chances"),
            ("verify_s", len(self.verify_s) > self.max_nodes, "max_nodes + 1 numbers"),
            ("extra_nodes_s", len(self.extra_nodes_s) > 1, "at least two numbers"),
        ):
            if not ok:
                raise InputError(f"policy {self.name}: {name} has to hold {wanted}; fit the policy again")

    @property
    def adapts(self) -> bool:
        return self.weights[-1] != 0.0

    @property
    def max_expanded(self) -> int:
        return len(self.extra_nodes_s) - 1

    @property
    def max_width(self) -> int:
        return self.width
