"""Dynamic tree policies against trees built from the papers' words, on made-up drafters.

Two engines drive the compiled functions: `grow` here, which asks a drafter for children as a real
run does, and the replay, which takes them from a record. The plain builders know neither; a
node there is the tuple of the tokens on its path.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost
from specsim.learn.fit import fit
from specsim.policy.tree.base import MAX_DRAFTED, UNKNOWN, TreePolicy, close_kept, limit_widths, new_tree
from specsim.policy.tree.beta_ts_tree import BetaTSTree
from specsim.policy.tree.cape import Cape
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.expansion import mark_best, nth_best
from specsim.policy.tree.pct import PCT
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from specsim.trace.tree_record import record_from_nodes
from tests.support.checks import refusal
from tests.support.reference import build_trace

Node = tuple[int, ...]
VOCABULARY = 10
DEFAULTS = (
    Cape(),
    Eagle2(),
    PCT(),
    PCT(test="level"),
    PCT(max_nodes=5),
    Eagle2(nodes=6, depth=3, top_k=2),
    BetaTSTree(alpha0=2.0),
)


class Drafter:
    """Draft probabilities after every prefix, float32, made of a seed; tokens are named by their rank.

    `tied` ones have probabilities of 1/2, 1/4 and 1/8 only, so that many paths are equally likely.
    """

    def __init__(self, seed: int, *, sharpness: float = 1.5, tied: bool = False) -> None:
        self.seed, self.sharpness, self.tied = seed, sharpness, tied
        self.after = functools.cache(self._after)

    def _after(self, prefix: Node) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *prefix])
        if self.tied:
            first = [[0.5, 0.25, 0.25], [0.25] * 4, [0.125] * 8, [0.5, 0.125, 0.125, 0.125, 0.125]][rng.integers(4)]
            return np.array(first + [0.0] * (VOCABULARY - len(first)), dtype=np.float32)
        logits = np.sort(rng.normal(size=VOCABULARY))[::-1] * self.sharpness * rng.exponential()
        weights = np.exp(logits - logits[0])
        return (weights / weights.sum()).astype(np.float32)


class Scripted:
    """A drafter with given probabilities after some prefixes, and a sure token after all others."""

    def __init__(self, table: dict[Node, list[float]]) -> None:
        self.table = table

    def after(self, prefix: Node) -> np.ndarray:
        probs = self.table.get(prefix, [1.0])
        return np.array(probs + [0.0] * (VOCABULARY - len(probs)), dtype=np.float32)


@dataclass
class Grown:
    """What a policy drafted and kept."""

    nodes: list[Node]  # the root first
    expanded: list[list[Node]]  # of every level that was expanded
    kept: set[Node]
    floor: float
    unknown: bool

    @property
    def drafted(self) -> int:
        return len(self.nodes) - 1

    @property
    def with_children(self) -> set[Node]:
        return {node for level in self.expanded for node in level}


def grow(policy: TreePolicy, drafter: Any, limit: int = 99, recorded: set[Node] | None = None) -> Grown:
    """Draft a tree level by level as an engine does. With `recorded`, other nodes are UNKNOWN, as in a replay."""
    tree, params = new_tree(), policy.params
    nodes: list[Node] = [()]
    expanded: list[list[Node]] = []
    widths = np.zeros(MAX_DRAFTED + 1, dtype=np.int32)
    state = policy.initial_state(params)
    first, unknown = 0, False
    while len(expanded) < min(limit, policy.max_draft_tokens):
        end = len(nodes)
        widths[:] = 0
        state = policy.expand(state, params, tree, first, end, 0.5, widths)
        assert not widths[:first].any() and not widths[end:].any()
        if limit_widths(widths, first, end, len(tree.path) - end)[0] == 0:
            break
        expanded.append([nodes[i] for i in range(first, end) if widths[i]])
        for parent in range(first, end):
            for rank in range(widths[parent]):
                node, at = (*nodes[parent], rank), len(nodes)
                known = recorded is None or node in recorded
                tree.prob[at] = drafter.after(nodes[parent])[rank] if known else UNKNOWN
                tree.path[at] = tree.path[parent] * tree.prob[at] if known else UNKNOWN
                tree.parent[at], tree.rank[at], tree.depth[at] = parent, rank, len(node)
                nodes.append(node)
                unknown |= not known
        first = end
    keep = np.zeros(len(nodes), dtype=np.bool_)
    keep[0] = True
    floor = policy.select(state, params, tree, len(nodes), keep)
    chosen = keep.copy()
    close_kept(tree, len(nodes), keep)
    assert recorded is not None or np.array_equal(chosen, keep)  # a whole tree, with nothing to drop
    return Grown(nodes, expanded, {node for node, kept in zip(nodes, keep, strict=True) if kept}, floor, unknown)


# The plain builders, from the papers' words.


@functools.cache
def path_of(drafter: Any, node: Node) -> np.float32:
    """Product of the draft probabilities of the tokens on the path, multiplied in float32 from the root on."""
    product = np.float32(1)
    for i, token in enumerate(node):
        product = np.float32(product * drafter.after(node[:i])[token])
    return product


def likeliest(drafter: Any, nodes: list[Node], n: int) -> list[Node]:
    """The n of largest path probability, likeliest first; the earlier among equals."""
    return sorted(nodes, key=lambda node: -path_of(drafter, node))[:n]


def children(node: Node, width: int) -> list[Node]:
    return [(*node, rank) for rank in range(width)]


def plain_cape(policy: Cape, drafter: Any, limit: int) -> tuple[int, set[Node], list[int]]:
    """Nodes drafted, nodes kept with the root, nodes expanded per level."""
    kept: set[Node] = {()}
    top: Node = ()
    oracle_width = max(policy.width_30, policy.width_60, policy.width_80, policy.width_100)
    levels = min(policy.depth, limit)
    for _ in range(levels):
        confidence = drafter.after(top).max()
        if confidence > 0.8:
            width = policy.width_100
        elif confidence > 0.6:
            width = policy.width_80
        elif confidence > 0.3:
            width = policy.width_60
        else:
            width = policy.width_30
        kept |= set(children(top, width))
        top = (*top, 0)
    return levels * oracle_width, kept, [1] * levels


def plain_eagle2(policy: Eagle2, drafter: Any, limit: int) -> tuple[int, set[Node], list[int]]:
    level: list[Node] = [()]
    drafted: list[Node] = []
    sizes = []
    for _ in range(min(policy.depth, limit)):
        beam = sorted(likeliest(drafter, level, policy.top_k))  # drafted in the order of the level
        sizes.append(len(beam))
        level = [child for node in beam for child in children(node, policy.top_k)]
        drafted += level
    return len(drafted), {(), *likeliest(drafter, drafted, policy.nodes)}, sizes


def plain_pct(policy: PCT, drafter: Any, limit: int) -> tuple[int, set[Node], list[int]]:
    level: list[Node] = [()]
    drafted: list[Node] = []
    sizes = []
    for depth in range(min(policy.max_depth, limit)):
        least = policy.cost_ratio if policy.test == "node" else policy.leaf_threshold
        open_nodes = [node for node in level if depth == 0 or path_of(drafter, node) >= least][: policy.max_nodes]
        reached = sum(float(path_of(drafter, node)) for node in open_nodes)
        if policy.test == "level" and depth and reached < policy.cost_ratio:
            break
        if not open_nodes:
            break
        sizes.append(len(open_nodes))
        level = [child for node in open_nodes for child in children(node, policy.width)]
        drafted += level
    likely = [node for node in drafted if path_of(drafter, node) >= policy.leaf_threshold]
    return len(drafted), {(), *likeliest(drafter, likely, policy.max_nodes)}, sizes


def plain_beta_ts_tree(policy: BetaTSTree, drafter: Any, limit: int) -> tuple[int, set[Node], list[int]]:
    """Of a first round whose every uniform is 1/2."""
    level: list[Node] = [()]
    drafted: list[Node] = []
    sizes = []
    for depth in range(min(policy.max_depth, limit)):
        urn = depth - 1 if policy.theta == "per_round" else 0
        if depth and 0.5 * (policy.alpha0 + policy.beta0 + urn) >= policy.alpha0 + urn:
            break
        beam = sorted(likeliest(drafter, level, policy.beam))
        sizes.append(len(beam))
        level = [child for node in beam for child in children(node, policy.width)]
        drafted += level
    return len(drafted), {(), *likeliest(drafter, drafted, policy.nodes)}, sizes


PLAIN: dict[type, Callable[[Any, Any, int], tuple[int, set[Node], list[int]]]] = {
    Cape: plain_cape,
    Eagle2: plain_eagle2,
    PCT: plain_pct,
    BetaTSTree: plain_beta_ts_tree,
}

WIDTHS = st.integers(1, 8)
CAPES = st.builds(Cape, width_30=WIDTHS, width_60=WIDTHS, width_80=WIDTHS, width_100=WIDTHS, depth=st.integers(1, 7))
EAGLES = st.builds(Eagle2, nodes=st.integers(1, 60), depth=st.integers(1, 5), top_k=st.integers(1, 7))
PCTS = st.builds(
    PCT,
    cost_ratio=st.floats(0.02, 1.2),
    leaf_threshold=st.sampled_from([0.0, 0.004, 0.01, 0.0625, 0.25, 0.3]),
    width=st.integers(1, 6),
    max_depth=st.integers(1, 6),
    max_nodes=st.sampled_from([1, 3, 8, 30, 64]),
    test=st.sampled_from(["node", "level"]),
)
BETA_TREES = st.builds(
    BetaTSTree,
    alpha0=st.sampled_from([1.0, 1.5, 3.0]),
    beta0=st.sampled_from([1.0, 2.0]),
    theta=st.sampled_from(["per_token", "per_round"]),
    beam=st.integers(1, 5),
    width=st.integers(1, 6),
    nodes=st.sampled_from([1, 4, 10, 30, 255]),
    max_depth=st.integers(1, 5),
)
POLICIES = st.one_of(CAPES, EAGLES, PCTS, BETA_TREES)
DRAFTERS = st.builds(Drafter, st.integers(0, 2**32 - 1), sharpness=st.sampled_from([0.2, 1.0, 3.0]), tied=st.booleans())


@settings(max_examples=150, deadline=None)
@given(policy=POLICIES, drafter=DRAFTERS, limit=st.integers(1, 8))
def test_a_tree_is_the_papers(policy: TreePolicy, drafter: Drafter, limit: int) -> None:
    grown = grow(policy, drafter, limit)
    drafted, kept, expanded = PLAIN[type(policy)](policy, drafter, limit)
    assert grown.kept == kept
    assert grown.drafted == drafted
    assert [len(level) for level in grown.expanded] == expanded


@settings(max_examples=100, deadline=None)
@given(policy=POLICIES, drafter=DRAFTERS)
def test_a_tree_keeps_to_its_bounds(policy: TreePolicy, drafter: Drafter) -> None:
    grown = grow(policy, drafter)
    assert len(grown.kept) - 1 <= policy.max_verified_nodes
    assert max(len(level) for level in grown.expanded) <= policy.max_expanded
    assert max(node[-1] for node in grown.nodes[1:]) < policy.max_width
    assert len(grown.nodes[-1]) <= policy.max_draft_tokens
    assert all(node[:-1] in grown.kept for node in grown.kept - {()})


def record(drafter: Any, nodes: int, width: int, depth: int) -> tuple[set[Node], np.float32]:
    """The chain to this depth and the likeliest nodes beside it, and the path of the likeliest node outside."""
    known: set[Node] = {(0,) * i for i in range(depth + 1)}

    def outside() -> list[Node]:
        return [child for node in known if len(node) < depth for child in children(node, width) if child not in known]

    while len(known) <= nodes:
        known.add(likeliest(drafter, sorted(outside()), 1)[0])
    return known, max(path_of(drafter, node) for node in outside())


SMALL_PCTS = st.builds(
    PCT,
    cost_ratio=st.sampled_from([0.03, 0.125, 0.2]),
    leaf_threshold=st.sampled_from([0.02, 0.0625, 0.2]),
    width=st.integers(1, 4),
    max_depth=st.integers(1, 4),
    max_nodes=st.sampled_from([2, 5, 30]),
    test=st.sampled_from(["node", "level"]),
)
SMALL_EAGLES = st.builds(Eagle2, nodes=st.integers(1, 12), depth=st.integers(1, 4), top_k=st.integers(1, 4))
SMALL_BETA_TREES = st.builds(
    BetaTSTree,
    alpha0=st.just(2.0),
    beam=st.integers(1, 4),
    width=st.integers(1, 4),
    nodes=st.sampled_from([2, 5, 9, 255]),
    max_depth=st.integers(1, 4),
)


@settings(max_examples=200, deadline=None)
@given(policy=st.one_of(SMALL_EAGLES, SMALL_PCTS, SMALL_BETA_TREES), drafter=DRAFTERS, nodes=st.integers(5, 40))
def test_nothing_below_the_floor_matters(policy: TreePolicy, drafter: Drafter, nodes: int) -> None:
    """Where the horizon is below the floor, the recorded nodes give the very tree that a real run keeps."""
    recorded, horizon = record(drafter, nodes, width=4, depth=4)
    replayed, real = grow(policy, drafter, recorded=recorded), grow(policy, drafter)
    if not replayed.unknown or horizon < replayed.floor:
        assert replayed.kept == real.kept
        assert replayed.drafted == real.drafted
        assert [len(level) for level in replayed.expanded] == [len(level) for level in real.expanded]
        # What decides whether the draft cache lacks the last accepted node.
        assert replayed.kept & replayed.with_children == real.kept & real.with_children


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (Eagle2(nodes=8, depth=4, top_k=4), (6, 9, 14)),
        (PCT(width=4, max_depth=4), (12, 25, 60)),
        (BetaTSTree(alpha0=2.0, beam=2, width=3, max_depth=4), (4, 9, 60)),
        (BetaTSTree(alpha0=2.0, beam=2, width=4, nodes=6, max_depth=4), (4, 8, 20)),
    ],
    ids=["eagle2", "pct", "beta_ts_tree, all", "beta_ts_tree, 6 nodes"],
)
def test_both_sides_of_the_floor_are_met(policy: TreePolicy, sizes: tuple[int, ...]) -> None:
    """The property above is not empty: with few recorded nodes rounds are truncated, with more of them fewer."""
    truncated = []
    for nodes in sizes:
        at_this_size = []
        for seed in range(12):
            recorded, horizon = record(Drafter(seed), nodes, width=4, depth=4)
            grown = grow(policy, Drafter(seed), recorded=recorded)
            at_this_size.append(grown.unknown and horizon >= grown.floor)
        truncated.append(sum(at_this_size))
    assert truncated[0] == 12 > truncated[1] > truncated[2] == 0


def test_too_few_known_nodes_are_never_enough() -> None:
    chain: set[Node] = {(0,) * i for i in range(7)}
    assert grow(Eagle2(), Drafter(1), recorded=chain).floor < 0
    beside = grow(Cape(), Scripted({(): [0.2] * 5}), recorded=chain)
    assert beside.floor == np.inf and len(beside.kept) == 1 + 7 + 4  # by rank, known or not
    assert grow(Cape(), Drafter(1), recorded=set(list(chain)[:1])).floor < 0


@pytest.mark.parametrize("policy", DEFAULTS, ids=str)
def test_a_beam_of_unknown_nodes_costs_what_a_known_one_does(policy: TreePolicy) -> None:
    """EAGLE-2 and Beta-TS expand as many nodes whatever they are; the others expand none of them."""
    grown = grow(policy, Drafter(3), recorded=set())
    if isinstance(policy, Eagle2 | BetaTSTree):
        real = grow(policy, Drafter(3))
        assert [len(level) for level in grown.expanded] == [len(level) for level in real.expanded]
        if isinstance(policy, Eagle2):
            assert grown.kept == {()}
        else:  # all are verified, so none of them need be known; but the beam was guessed
            assert grown.kept == set(grown.nodes) and grown.floor == UNKNOWN
    elif isinstance(policy, PCT):
        assert grown.expanded == [[()]] and grown.kept == {()}


FIGURE_4 = Scripted(
    {
        (): [0.6, 0.3, 0.06, 0.03, 0.01],
        (0,): [0.8, 0.1, 0.05, 0.05],
        (1,): [0.3, 0.2, 0.2, 0.2, 0.1],
        (0, 0): [0.2, 0.1, 0.1],
    }
)


def test_pct_by_hand() -> None:
    """As in figure 4: s_d / s_t = 0.1, leaves below 0.05 removed.

    Level 1: .6 .3 .06 .03 .01; the first two are expanded. Level 2: .48 .06 .03 .03 .0 and .09 .06
    .06 .06 .03; only .48 is expanded. Level 3: .096 .048 .048 0 0, none of which is.
    """
    grown = grow(PCT(cost_ratio=0.1, leaf_threshold=0.05), FIGURE_4)
    assert grown.expanded == [[()], [(0,), (1,)], [(0, 0)]]
    assert grown.drafted == 20
    assert grown.kept == {(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 0, 0)}
    assert grown.floor == 0.05
    best = grow(PCT(cost_ratio=0.1, leaf_threshold=0.05, max_nodes=4), FIGURE_4)
    assert best.kept == {(), (0,), (1,), (0, 0), (0, 0, 0)} and best.floor == pytest.approx(0.096)
    assert grow(PCT(cost_ratio=0.1, leaf_threshold=0.05, max_nodes=2), FIGURE_4).floor == 0.1  # it decides passes


def test_pct_level_test_sums_over_the_level() -> None:
    """Ten nodes of 0.08 are each below s_d / s_t = 0.2, the level as a whole is not."""
    drafter = Scripted({(): [0.4, 0.4], (0,): [0.2] * 5, (1,): [0.2] * 5})
    node, level = (PCT(cost_ratio=0.2, leaf_threshold=0.05, max_depth=3, test=test) for test in ("node", "level"))
    assert [len(x) for x in grow(node, drafter).expanded] == [1, 2]
    assert [len(x) for x in grow(level, drafter).expanded] == [1, 2, 10]
    dear = dataclasses.replace(level, cost_ratio=0.81)
    assert [len(x) for x in grow(dear, drafter).expanded] == [1]


@pytest.mark.parametrize(
    ("confidence", "nodes"), [(0.1, 7), (0.29, 7), (0.31, 5), (0.5, 5), (0.61, 3), (0.79, 3), (0.81, 1), (1.0, 1)]
)
def test_cape_is_as_wide_as_the_confidence_asks(confidence: float, nodes: int) -> None:
    rest = (1 - confidence) / 9
    drafter = Scripted({(): [confidence] + [rest] * 9})
    grown = grow(Cape(depth=2), drafter)
    assert [node for node in sorted(grown.kept) if len(node) == 1] == children((), nodes)
    assert [node for node in sorted(grown.kept) if len(node) == 2] == [(0, 0)]
    assert grown.expanded == [[()], [(0,)]] and grown.drafted == 14


def test_eagle2_takes_its_settings_from_the_paper() -> None:
    grown = grow(Eagle2(), Drafter(8, sharpness=0.2))
    assert [len(level) for level in grown.expanded] == [1, 10, 10, 10, 10, 10]
    assert grown.drafted == 510 and len(grown.kept) == 51


def test_eagle2_refuses_a_tree_without_room() -> None:
    refusal(lambda: Eagle2(depth=12), "depth=12 and top_k=10 draft 1110 nodes, more than 1023; lower either")


def test_pct_reads_the_cost_ratio_off_the_costs() -> None:
    table: Any = SimpleNamespace(step_ratio=1.1 / 29.8)
    assert fit(PCT, {}, None, table).cost_ratio == pytest.approx(0.0369, abs=5e-5)
    assert fit(PCT, {"cost_ratio": 0.2}, None, table).cost_ratio == 0.2


@pytest.mark.parametrize("ratio", [0.037, 0.1, 1 / 3, float(np.float32(1 / 3)), 0.25, 2.0])
def test_no_level_of_pct_expands_more_than_it_says(ratio: float) -> None:
    """As many equally likely nodes as fit above the ratio: the bound is met, rounding or not."""
    most = int(max(1, 1 // (ratio - 1e-7)))
    drafter = Scripted({(): [1 / most] * min(most, VOCABULARY)})
    policy = PCT(cost_ratio=ratio, width=8, max_depth=2)
    expanded = max(len(level) for level in grow(policy, drafter).expanded)
    assert expanded <= policy.max_expanded == most
    if 1 < most <= 8:
        assert expanded == most


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.sampled_from([UNKNOWN, 0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0]), min_size=1, max_size=60),
    n=st.integers(1, 64),
    skip=st.integers(0, 5),
)
def test_the_best_of_a_range(values: list[float], n: int, skip: int) -> None:
    path = np.array(values, dtype=np.float32)
    first = min(skip, len(path) - 1)
    marks, heap = np.zeros(len(path), dtype=np.int32), np.full(64, np.nan)
    known = [i for i in range(first, len(path)) if path[i] >= 0]
    best = sorted(known, key=lambda i: (-path[i], i))[:n]
    least = mark_best(path, first, len(path), n, 7, marks, heap)
    assert np.flatnonzero(marks).tolist() == sorted(best) and set(marks) <= {0, 7}
    assert least == (path[best[-1]] if len(known) >= n else UNKNOWN) == nth_best(path, first, len(path), n, heap)


class After:
    """The drafter as it is after some output."""

    def __init__(self, drafter: Drafter, output: Node) -> None:
        self.drafter, self.output = drafter, output

    def after(self, prefix: Node) -> np.ndarray:
        return self.drafter.after(self.output + prefix)


LENGTHS, DEPTH, WIDTH = (25, 1, 14), 3, 3


@functools.cache
def recorded_text(nodes: int | None) -> tuple[Trace, dict[tuple[int, int], tuple[After, set[Node]]]]:
    """A trace whose tokens are drawn from a drafter, with so many nodes recorded per position, or with all of them.

    Beside it, the drafter and the recorded nodes of every (sequence, t).
    """
    drafter, rng = Drafter(7, sharpness=2.0), np.random.default_rng(5)
    true_rank = np.full((sum(LENGTHS), DEPTH), -1, dtype=np.int16)
    places: dict[tuple[int, int], tuple[After, set[Node]]] = {}
    parent, prob, horizon = [], [], []
    every = [node for depth in range(DEPTH + 1) for node in itertools.product(range(WIDTH), repeat=depth)]
    most = len(every) - 1 if nodes is None else nodes
    for s, length in enumerate(LENGTHS):
        output: Node = (s,)
        for _ in range(length):
            accept_probs = drafter.after(output).astype(np.float64)
            output += (int(rng.choice(VOCABULARY, p=accept_probs / accept_probs.sum())),)
        for t in range(length):
            row = len(parent)
            ahead = output[1 + t : 1 + t + DEPTH]
            true_rank[row, : len(ahead)] = ahead
            here = After(drafter, output[: 1 + t])
            recorded, beyond = (set(every), -1.0) if nodes is None else record(here, nodes, WIDTH, DEPTH)
            places[s, t] = here, recorded
            order = sorted(recorded, key=lambda node: (len(node), node))
            parent.append([order.index(node[:-1]) for node in order[1:]])
            prob.append([here.after(node[:-1])[node[-1]] for node in order[1:]])
            horizon.append(beyond)
    tree = record_from_nodes(np.array(parent), np.zeros((len(parent), most)), np.array(prob), np.array(horizon), WIDTH)
    trace = build_trace(rng, true_rank == 0, list(LENGTHS), true_rank=true_rank)
    return dataclasses.replace(trace, tree=tree), places


NARROW = (
    Cape(width_30=3, width_60=2, width_80=2, depth=3),
    Eagle2(nodes=9, depth=3, top_k=3),
    Eagle2(nodes=2, depth=2, top_k=2),
    PCT(cost_ratio=0.1, leaf_threshold=0.05, width=3, max_depth=3),
    PCT(cost_ratio=0.02, width=3, max_depth=3, max_nodes=7),
    PCT(cost_ratio=0.3, width=3, max_depth=3, test="level"),
)


def rounds_of(policy: TreePolicy, nodes: int | None) -> tuple[list[tuple[int, ...]], list[int]]:
    """Rows (sequence, t, drafted, accepted, verified, last) and truncated rounds per sequence, round by round."""
    trace, places = recorded_text(nodes)
    rows, truncated = [], [0] * len(LENGTHS)
    for s, length in enumerate(LENGTHS):
        t = 0
        while t < length:
            row = int(trace.offsets[s]) + t
            here, recorded = places[s, t]
            limit = int(trace.budget_tokens[s]) - t - 1
            grown = grow(policy, here, limit, None if nodes is None else recorded)
            if nodes is None:
                drafted, kept, _ = PLAIN[type(policy)](policy, here, limit)
                assert (drafted, kept) == (grown.drafted, grown.kept)
            elif grown.unknown and trace.tree.horizon[row] >= grown.floor:
                truncated[s] += 1
            last: Node = ()
            for rank in trace.true_rank[row]:
                if (*last, int(rank)) not in grown.kept:
                    break
                last = (*last, int(rank))
            place = sum(node in grown.kept for node in grown.nodes[1 : grown.nodes.index(last) + 1])
            rows.append((s, t, grown.drafted, len(last), len(grown.kept) - 1, place))
            t += len(last) + 1
    return rows, truncated


@pytest.mark.parametrize("nodes", [None, 12], ids=["complete", "12 nodes"])
@pytest.mark.parametrize("policy", NARROW, ids=str)
def test_a_replay_is_the_plain_trees(policy: TreePolicy, nodes: int | None) -> None:
    trace, _ = recorded_text(nodes)
    result = replay(trace, policy, cost_table(trace, ConstantCost(s_d=1.0, s_t=10.0)), log=True)
    rows, truncated = rounds_of(policy, nodes)
    assert result.rounds.rows() == rows
    assert result.truncated.tolist() == truncated
    assert sum(row[3] for row in rows) > 0
