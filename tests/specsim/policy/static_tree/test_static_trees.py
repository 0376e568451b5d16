"""Static trees: their shapes, the best of all by enumeration, also where costs count, and what policies learn."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from specsim.cli.tree import drawing
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn.fit import fit, needs_fitting
from specsim.policy.base import build_policy
from specsim.policy.static_tree import shape as shapes
from specsim.policy.static_tree.optimal import TreeRoundCost, optimal_tree, optimal_trees, price, tree_round_cost
from specsim.policy.static_tree.rates import check_rates, rates_of, read_rates
from specsim.policy.static_tree.search import (
    best_trees,
    grow,
    max_tree_nodes,
    node_accept_probs,
    tree_of,
)
from specsim.policy.tree.base import new_tree
from specsim.policy.tree.cartesian import Cartesian
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.policy.tree.static import StaticTree, check_shape, level_sizes
from specsim.policy.tree.vct import VCT
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.specsim.replaying.test_tree_replay import LeafyCost
from tests.support.checks import refusal
from tests.support.reference import small_trace
from tests.support.tree_cases import all_trees, drawn_trace, ranked_trace

MEDUSA_FIGURE_2 = (2, 3, 3, 0, 0, 0, 0, 0, 0)


@st.composite
def trees(draw: st.DrawFn, nodes: int = 14, width: int = 4) -> shapes.Shape:
    """Any tree of at most so many nodes: each new node is the next child of an earlier node."""
    paths: list[shapes.Path] = [()]
    counts = {(): 0}
    for _ in range(draw(st.integers(1, nodes))):
        parent = draw(st.sampled_from([path for path in paths if counts[path] < width]))
        paths.append((*parent, counts[parent]))
        counts[parent] += 1
        counts[paths[-1]] = 0
    return shapes.from_paths(paths)


@given(trees())
def test_paths_and_child_counts_are_two_forms_of_one_tree(shape: shapes.Shape) -> None:
    paths = shapes.to_paths(shape)
    assert shapes.from_paths(reversed(paths)) == shape
    assert len(set(paths)) == len(paths) == len(shape) - 1 == sum(shape)
    check_shape("test", shape)


@given(trees())
def test_parents_ranks_and_depths_are_those_of_the_paths(shape: shapes.Shape) -> None:
    paths = [(), *shapes.to_paths(shape)]
    assert [paths[p] for p in shapes.parents(shape)[1:]] == [path[:-1] for path in paths[1:]]
    assert shapes.ranks(shape)[1:].tolist() == [path[-1] for path in paths[1:]]
    assert shapes.depths(shape).tolist() == [len(path) for path in paths]
    assert shapes.parents(shape)[0] == -1 and shapes.ranks(shape)[0] == 0
    assert np.bincount(shapes.depths(shape)).tolist() == level_sizes(shape)


@given(trees(), st.integers(1, 6))
def test_a_cut_tree_keeps_the_nodes_down_to_that_depth(shape: shapes.Shape, depth: int) -> None:
    kept = [path for path in shapes.to_paths(shape) if len(path) <= depth]
    assert shapes.to_paths(shapes.cut(shape, depth)) == kept


def test_a_tree_cut_at_the_root_has_no_node() -> None:
    assert shapes.cut(MEDUSA_FIGURE_2, 0) == (0,)


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ([], "no node given"),
        ([()], "no node given"),
        ([(0,), (1, 0)], r"path \(1, 0\) lacks its parent \(1,\)"),
        ([(0,), (2,)], r"path \(2,\) lacks its sibling \(1,\)"),
        ([(0,), (0, 1)], r"path \(0, 1\) lacks its sibling \(0, 0\)"),
        ([(0,), (-1,)], r"path \(-1,\) has a negative rank"),
    ],
)
def test_paths_with_gaps_are_refused(paths: Iterable[tuple[int, ...]], complaint: str) -> None:
    refusal(lambda: shapes.from_paths(paths), match=complaint)


def test_a_cartesian_tree_has_the_nodes_that_medusa_counts() -> None:
    """Section 3.1.2: sum over k of prod_{i <= k} s_i nodes; figure 2 has 2 x 3 = 6 candidates."""
    assert shapes.cartesian((2, 3)) == MEDUSA_FIGURE_2
    assert sum(count == 0 for count in shapes.cartesian((2, 3))) == 6
    for sizes in [(1,), (4, 3, 2, 1), (5, 1, 4), (10, 10, 2)]:
        shape = shapes.cartesian(sizes)
        assert level_sizes(shape)[1:] == np.cumprod(sizes).tolist()
        check_shape("test", shape)
    assert shapes.cartesian((2, 3, 0, 4)) == MEDUSA_FIGURE_2


def test_a_full_vanilla_tree_is_the_cartesian_one() -> None:
    full = shapes.vct(3, 5, 3**5)
    assert full == shapes.cartesian((3,) * 5) and len(full) - 1 == 363  # errata B11


def test_a_capped_vanilla_tree_keeps_the_least_rank_sums_of_each_level() -> None:
    shape = shapes.vct(3, 5, 10)
    assert level_sizes(shape) == [1, 3, 9, 10, 10, 10]
    paths = shapes.to_paths(shape)
    for depth in (3, 4, 5):
        above = [path for path in paths if len(path) == depth - 1]
        kept = {path for path in paths if len(path) == depth}
        left = {(*path, rank) for path in above for rank in range(3)} - kept
        assert max(map(sum, kept)) <= min(map(sum, left))
    assert shapes.vct(3, 4, 1) == (1, 1, 1, 1, 0)


@given(trees(), st.lists(st.lists(st.integers(-1, 4), min_size=5, max_size=5), min_size=1, max_size=8))
def test_a_tree_accepts_down_to_its_first_missing_node(shape: shapes.Shape, true_rank: list[list[int]]) -> None:
    paths = set(shapes.to_paths(shape))
    wanted = []
    for row in true_rank:
        length = 0
        while length < len(row) and tuple(row[: length + 1]) in paths:
            length += 1
        wanted.append(length)
    assert shapes.accepted_tokens(shape, np.array(true_rank, dtype=np.int16)).tolist() == wanted


def test_a_drawing_has_a_line_per_node_and_no_markup() -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(drawing((2, 1, 0, 0), ["1.0", "0.5", "[b]", "0.2"]))
    lines = [line.strip("│├└─ ") for line in text.getvalue().splitlines()]
    assert lines == ["root  1.0", "0  0.5", "0  0.2", "1  [b]"]


TENTHS = st.integers(0, 10).map(lambda tenths: tenths / 10)  # many ties


@st.composite
def some_rates(draw: st.DrawFn, ordered: bool | None = None) -> np.ndarray:
    depth, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    values = draw(st.sampled_from([TENTHS, st.floats(0, 1)]))
    rows = []
    for _ in range(depth):
        row = np.array(draw(st.lists(values, min_size=ranks, max_size=ranks)))
        row = row / max(1.0, row.sum())
        rows.append(-np.sort(-row) if ordered else row)
    return np.array(rows)


def tokens_by_hand(rates: np.ndarray, shape: shapes.Shape) -> float:
    """1 + the sum over nodes of the products along their paths."""
    total = 1.0
    for path in shapes.to_paths(shape):
        total += np.prod([rates[depth, rank] for depth, rank in enumerate(path)])
    return total


def test_the_enumeration_counts_the_trees() -> None:
    """Binary trees with sibling order and n nodes below the root: 1, 2, 4, 9 (Motzkin)."""
    assert [len(set(all_trees(9, 2, n))) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 9, 21]
    assert [len(all_trees(9, 9, n)) for n in (1, 2, 3, 4, 5)] == [1, 2, 5, 14, 42]  # Catalan


@pytest.mark.parametrize("ordered", [True, False])
@given(data=st.data())
def test_no_tree_of_the_size_is_better(ordered: bool, data: st.DataObject) -> None:
    rates = data.draw(some_rates(ordered))
    trees = best_trees(rates, 6)
    assert trees.nodes == min(6, max_tree_nodes(rates))
    assert trees.expected_tokens[0] == 1.0
    for nodes in range(1, trees.nodes + 1):
        best = max(tokens_by_hand(rates, shape) for shape in all_trees(*rates.shape, nodes))
        shape = trees.shape(nodes)
        assert len(shape) == nodes + 1
        assert tokens_by_hand(rates, shape) == pytest.approx(best, abs=1e-12)
        assert trees.expected_tokens[nodes] == pytest.approx(best, abs=1e-12)
        assert node_accept_probs(rates, shape).sum() == pytest.approx(best, abs=1e-12)


@given(some_rates(ordered=True), st.integers(1, 40))
def test_greedy_and_dynamic_programming_agree(rates: np.ndarray, nodes: int) -> None:
    trees = best_trees(rates, nodes)
    worth, taken = grow(rates, rates.shape[1], trees.nodes)
    assert trees.expected_tokens == pytest.approx(1 + worth, abs=1e-9)
    shape = tuple(tree_of(taken, trees.nodes).tolist())
    assert node_accept_probs(rates, shape).sum() == pytest.approx(trees.expected_tokens[-1], abs=1e-9)


@given(some_rates(), st.integers(1, 2))
def test_where_few_ranks_fork_the_others_are_leaves(rates: np.ndarray, forks: int) -> None:
    forking = [set(np.argsort(-at_depth, kind="stable")[:forks].tolist()) for at_depth in rates]  # the likeliest
    for nodes in range(1, 7):
        allowed = [
            tokens_by_hand(rates, shape)
            for shape in all_trees(*rates.shape, nodes)
            if all(rank in forking[depth] for path in shapes.to_paths(shape) for depth, rank in enumerate(path[:-1]))
        ]
        worth, _ = grow(rates, forks, nodes)
        assert 1 + worth[nodes] == pytest.approx(max(allowed, default=-np.inf), abs=1e-12)


def test_each_of_256_nodes_adds_less_than_the_one_before() -> None:
    rates = 0.7 ** np.arange(1, 11) * np.ones((16, 1)) * 0.4
    curve = best_trees(rates, 256).expected_tokens
    assert len(curve) == 257 and (np.diff(curve) > 0).all() and (np.diff(curve, 2) <= 1e-12).all()


def test_few_rates_give_few_nodes() -> None:
    rates = np.array([[0.5, 0.2], [0.4, 0.1]])
    assert max_tree_nodes(rates) == 6 and best_trees(rates, 100).nodes == 6


def test_rates_of_a_trace_are_counted_by_hand() -> None:
    ranks = np.array([[0, 1, 0], [1, 0, -1], [5, 0, 0], [0, -1, -1]], dtype=np.int16)
    rates = rates_of(ranked_trace(ranks, [2, 2]), ranks=2)
    # Beyond depth 1 the third position is out of reach (rank 5); the second and last are at their output's end.
    assert rates.tolist() == [[0.5, 0.25], [0.0, 1.0], [0.0, 0.0]]


def test_rates_of_a_trace_find_those_that_made_it() -> None:
    made = np.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.2, 0.1], [0.3, 0.2, 0.2]])
    trace = drawn_trace(made, [20_000], seed=5)
    rates = rates_of(trace, ranks=3)
    assert rates == pytest.approx(made, abs=0.02)
    shape = best_trees(rates, 12).shape(12)
    measured = 1 + shapes.accepted_tokens(shape, trace.true_rank).mean()
    assert measured == pytest.approx(node_accept_probs(rates, shape).sum(), abs=0.03)


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    return tmp_path / "rates.csv"


@pytest.mark.parametrize(
    "text",
    [
        "depth,top1,top2\n1,0.5,0.25\n2,0.4,0.1\n",
        "0.5,0.25\n0.4,0.1\n",
        "\ufeffDepth, top1, top2\r\n1, 0.5, 0.25\r\n\r\n2, 0.4, 0.1\r\n",
    ],
)
def test_rates_are_read_with_and_without_header(csv_file: Path, text: str) -> None:
    csv_file.write_text(text, encoding="utf-8")
    assert read_rates(csv_file).tolist() == [[0.5, 0.25], [0.4, 0.1]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no rates"),
        ("depth,top1\n", "has no rates"),
        ("depth\n1\n", "has no rates"),
        ("head,top1\n1,0.5\n", "header starts with 'head'"),
        ("depth,top1\n2,0.5\n", "line 2: depth '2' where 1 is due"),
        ("depth,top1\none,0.5\n", "line 2: depth 'one' where 1 is due"),
        ("0.5,0.25\n0.4\n", "line 2: 1 rates where the first line has 2"),
        ("0.5,x\n", "line 1: 'x' is not a number"),
        ("0.5,nan\n", "depth 1 is outside"),
        ("0.4,0.2\n50,20\n", "depth 2 is outside"),
        ("0.9,-0.1\n", "depth 1 is outside"),
        ("0.9,0.2\n", "depth 1 sum to 1.1, as cumulative"),
        ("0.30,0.33,0.35\n0.20,0.24,0.26\n", "rates rise .* give the differences"),
    ],
)
def test_malformed_rates_are_refused(csv_file: Path, text: str, complaint: str) -> None:
    csv_file.write_text(text)
    refusal(lambda: read_rates(csv_file), match=complaint)


def test_bytes_are_no_csv(csv_file: Path) -> None:
    csv_file.write_bytes(b"\xff\xfe\x00")
    refusal(lambda: read_rates(csv_file), "is no CSV text")


def test_rates_of_another_form_are_refused() -> None:
    for rates in (np.zeros(3), np.zeros((0, 3)), np.zeros((2, 0))):
        with pytest.raises(InputError, match="a row per depth"):
            check_rates(rates, "rates")
    check_rates(np.array([[0.5, 0.5 + 1e-10]]), "rates")


RATES = np.array([[0.6, 0.2, 0.1], [0.5, 0.25, 0.1], [0.55, 0.2, 0.05], [0.5, 0.2, 0.1], [0.45, 0.2, 0.1]])


def round_cost(rng: np.random.Generator, depth: int, nodes: int, *, widths: bool) -> TreeRoundCost:
    """Random costs that rise with depth and nodes; where widths count, wider passes and catching up do, too."""
    extra = np.arange(nodes + 2) * rng.uniform(0, 5e-4) if widths else np.zeros(nodes + 2)
    return TreeRoundCost(
        draft_s=np.concatenate([[0], np.cumsum(rng.uniform(1e-4, 3e-3, depth))]),
        catch_up_s=rng.uniform(0, 5e-4) if widths else 0.0,
        wider_s=np.maximum(extra - extra[1], 0),
        verify_s=np.cumsum(rng.exponential(rng.choice([1e-5, 1e-3]), nodes + 2)) + rng.uniform(1e-3, 1e-2),
        policy_step_s=1e-5,
        round_overhead_s=1e-4,
        autoregressive_s=9e-3,
    )


def priced_by_hand(shape: shapes.Shape, rates: np.ndarray, cost: TreeRoundCost) -> tuple[float, float]:
    """Tokens and seconds of a round, node by node from the definition."""
    paths = [(), *shapes.to_paths(shape)]
    chance = {path: float(np.prod([rates[d, rank] for d, rank in enumerate(path)])) for path in paths}
    levels = max(map(len, paths))
    seconds = cost.verify_s[len(shape)] + cost.round_overhead_s
    for depth in range(levels):
        expanded = sum(count > 0 for path, count in zip(paths, shape, strict=True) if len(path) == depth)
        step_s = cost.draft_s[depth + 1] - cost.draft_s[depth]
        seconds += step_s + (cost.wider_s[expanded] if expanded > 1 else 0) + cost.policy_step_s
    # A round after a round that ended on a leaf ingests that token first.
    seconds += cost.catch_up_s * sum(chance[path] for path, count in zip(paths, shape, strict=True) if not count)
    return sum(chance.values()), seconds


@st.composite
def cases(draw: st.DrawFn, widths: bool) -> tuple[np.ndarray, TreeRoundCost]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    depth, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rates = rng.dirichlet(np.ones(ranks + 1) * 0.5, size=depth)[:, :ranks]
    if draw(st.booleans()):
        rates = -np.sort(-rates, axis=1)
    return rates, round_cost(rng, depth, 6, widths=widths)


@given(cases(widths=False))
def test_where_passes_cost_the_same_it_is_the_best_of_all_trees(case: tuple[np.ndarray, TreeRoundCost]) -> None:
    rates, cost = case
    trees = optimal_trees(rates, cost, max_nodes=6, max_depth=9)
    for tree in trees:
        every = [priced_by_hand(shape, rates, cost) for shape in all_trees(*rates.shape, tree.nodes)]
        assert tree.tokens_per_s == pytest.approx(max(tokens / seconds for tokens, seconds in every), rel=1e-9)
    best = optimal_tree(rates, cost, max_nodes=6, max_depth=9)
    assert best.tokens_per_s == max(tree.tokens_per_s for tree in trees)


@settings(max_examples=60)
@given(cases(widths=True))
def test_where_widths_cost_it_is_close_to_the_best_of_all_trees(case: tuple[np.ndarray, TreeRoundCost]) -> None:
    rates, cost = case
    every = [
        np.divide(*priced_by_hand(shape, rates, cost))
        for nodes in range(1, 7)
        for shape in all_trees(*rates.shape, nodes)
    ]
    best = optimal_tree(rates, cost, max_nodes=6, max_depth=9).tokens_per_s
    assert 0.98 * max(every) <= best <= max(every) * (1 + 1e-9)


@given(cases(widths=True), st.data())
def test_a_tree_is_priced_by_the_definition(case: tuple[np.ndarray, TreeRoundCost], data: st.DataObject) -> None:
    rates, cost = case
    sizes = [nodes for nodes in range(1, 7) if all_trees(*rates.shape, nodes)]
    shape = data.draw(st.sampled_from(all_trees(*rates.shape, data.draw(st.sampled_from(sizes)))))
    tree = price(shape, rates, cost)
    assert (tree.tokens, tree.seconds) == pytest.approx(priced_by_hand(shape, rates, cost), rel=1e-12)
    assert tree.nodes == len(shape) - 1


def test_it_goes_no_further_than_limits_and_costs() -> None:
    cost = round_cost(np.random.default_rng(1), depth=3, nodes=20, widths=True)
    free = cost._replace(verify_s=np.full(22, 1e-2), draft_s=np.arange(4) * 1e-9, wider_s=np.zeros(22))
    assert [tree.nodes for tree in optimal_trees(RATES, free, max_nodes=99, max_depth=9)] == list(range(1, 21))
    best = optimal_tree(RATES, free, max_nodes=12, max_depth=9)
    assert best.nodes == 12 and max(shapes.depths(best.shape)) == 3
    assert max(shapes.depths(optimal_tree(RATES, free, max_nodes=12, max_depth=2).shape)) == 2
    narrow = free._replace(wider_s=np.zeros(3))  # passes over 1 or 2 nodes are known
    trees = optimal_trees(RATES, narrow, max_nodes=20, max_depth=9)
    assert trees and all(np.isfinite(tree.seconds) for tree in trees)


def test_with_costs_that_do_not_grow_it_is_the_sparse_tree() -> None:
    """Then only tokens count, and the programme finds what MEDUSA's greedy search does."""
    flat = round_cost(np.random.default_rng(3), 5, 40, widths=False)._replace(verify_s=np.full(42, 1e-2))
    free = flat._replace(draft_s=np.zeros(6), policy_step_s=0.0)
    for tree in optimal_trees(RATES, free, max_nodes=40, max_depth=5):
        assert tree.tokens == pytest.approx(best_trees(RATES, 40).expected_tokens[tree.nodes], abs=1e-12)


def test_the_replay_takes_as_long_as_predicted() -> None:
    trace = drawn_trace(RATES, [4000] * 10, seed=1)
    table = cost_table(trace, LeafyCost())
    policy = fit(OptimalTree, {"max_nodes": 40}, trace, table)
    cost = tree_round_cost(table, trace)
    tree = price(policy.shape, rates_of(trace), cost)
    result = replay(trace, policy, table)
    assert result.output_tokens.sum() / result.num_rounds.sum() == pytest.approx(tree.tokens, rel=0.01)
    assert result.seconds.sum() / result.num_rounds.sum() == pytest.approx(tree.seconds, rel=0.005)
    assert result.output_tokens.sum() / result.seconds.sum() == pytest.approx(tree.tokens_per_s, rel=0.01)
    assert result.autoregressive_s.sum() / result.output_tokens.sum() == pytest.approx(cost.autoregressive_s)


def test_costs_are_averaged_over_contexts() -> None:
    trace = drawn_trace(RATES, [40, 200])
    cost, model = tree_round_cost(cost_table(trace, LeafyCost()), trace), LeafyCost()
    middle = np.repeat(trace.prompt_tokens - 1, trace.output_tokens) + trace.position
    middle = np.minimum((middle // 16 + 0.5) * 16, middle.max())  # the table's columns
    assert cost.verify_s[7] == pytest.approx(model.tree_verify(7, middle).mean(), rel=1e-3)
    assert cost.draft_s[3] == pytest.approx(model.draft(3, middle).mean(), rel=1e-3)
    assert cost.draft_s[0] == 0 and cost.wider_s[1] == 0
    assert cost.wider_s[5] == pytest.approx(model.wider(5, middle).mean(), rel=1e-3)
    assert cost.catch_up_s == pytest.approx(model.catch_up(middle).mean(), rel=1e-3)
    assert (cost.policy_step_s, cost.round_overhead_s) == (7e-6, 6e-4)


def test_costs_of_chains_alone_are_refused() -> None:
    trace = drawn_trace(RATES, [40])
    table = replace(cost_table(trace, ConstantCost(1e-3, 1e-2)), tree=None)
    refusal(lambda: tree_round_cost(table, trace), "do not price trees")


KINDS: tuple[type[StaticTree], ...] = (VCT, Cartesian, SparseTree, OptimalTree)
COST = ConstantCost(1e-3, 1e-2)


@pytest.fixture(scope="module")
def trace() -> Any:
    return drawn_trace(RATES, [60, 200, 90, 150] * 3)


def grown(policy: StaticTree) -> shapes.Shape:
    """The tree that the policy's compiled function grows, asked level by level; all of it is kept."""
    tree, widths = new_tree(), np.zeros(1024, dtype=np.int32)
    state = policy.initial_state(policy.params)
    first, end = 0, 1
    while first < end:
        state = policy.expand(state, policy.params, tree, first, end, 0.5, widths)
        first, end = end, end + int(widths[first:end].sum())
    keep = np.zeros(1024, dtype=np.bool_)
    keep[0] = True
    assert policy.select(state, policy.params, tree, end, keep) == np.inf and keep.sum() == end
    return tuple(widths[:end].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_grows_is_its_shape(kind: type[StaticTree]) -> None:
    policy = kind()
    check_shape("test", policy.shape)
    assert grown(policy) == policy.shape
    assert policy.static and policy.features == ("true_rank",)
    assert policy.max_verified_nodes == len(policy.shape) - 1
    assert policy.max_draft_tokens == shapes.depths(policy.shape).max()


def test_the_named_shapes() -> None:
    assert VCT().shape == shapes.cartesian((3,) * 5)
    assert VCT(width=2, depth=3, level_nodes=3).shape == (2, 2, 1, 2, 1, 0, 0, 0, 0)
    assert Cartesian(s1=2, s2=3).shape == (2, 3, 3, 0, 0, 0, 0, 0, 0)
    assert Cartesian(s1=4, s2=2, s3=1, s4=1).shape == shapes.cartesian((4, 2, 1, 1))
    assert Cartesian(s1=3, s2=0, s3=2, s4=2).shape == (3, 0, 0, 0)
    assert SparseTree().max_verified_nodes == 63 and SparseTree().max_draft_tokens == 4


def test_all_that_tuning_may_try_can_be_priced() -> None:
    """Cost tables reach 256 tokens, the pending token included."""
    assert VCT(width=8, depth=8, level_nodes=32).max_verified_nodes < 256
    assert Cartesian(s1=6, s2=4, s3=2, s4=2).max_verified_nodes < 256


def test_children_can_be_given() -> None:
    policy = build_policy(SparseTree, {"children": "2,1,0,0"})
    assert policy.shape == (2, 1, 0, 0) and policy.max_draft_tokens == 2
    assert build_policy(SparseTree, policy.settings) == policy


@pytest.mark.parametrize(
    ("kind", "settings", "complaint"),
    [
        (SparseTree, {"children": "2,1,0"}, "not a tree's"),
        (SparseTree, {"children": "0"}, "not a tree's"),
        (SparseTree, {"children": "0,1"}, "end before their node 1"),
        (SparseTree, {"children": "1.5,0.5,0"}, "no whole number"),
        (SparseTree, {"children": "-1,1"}, "outside"),
        (OptimalTree, {"children": "2,0"}, "not a tree's"),
        (VCT, {"width": 3, "depth": 7, "level_nodes": 1022}, "a tree of 2115 nodes"),
        (Cartesian, {"s1": 11, "s2": 10, "s3": 10}, "a tree of 1222 nodes"),
        (Cartesian, {"s1": 0}, "outside"),
        (VCT, {"depth": 0}, "outside"),
    ],
)
def test_what_is_no_tree_is_refused(kind: type[StaticTree], settings: dict[str, Any], complaint: str) -> None:
    refusal(lambda: build_policy(kind, settings), match=complaint)


@pytest.mark.parametrize(
    "policy",
    [
        VCT(width=2, depth=4, level_nodes=5),
        Cartesian(s1=3, s2=2, s3=1),
        build_policy(SparseTree, {"children": "1,1,0"}),
    ],
)
def test_the_replay_accepts_what_the_shape_says(trace: Any, policy: StaticTree) -> None:
    accepted = shapes.accepted_tokens(policy.shape, trace.true_rank)
    rounds = []
    for s, (start, end) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        t = start
        while t < end:
            # Nothing is drafted for the budget's last token: the target adds that itself.
            most = trace.budget_tokens[s] - (t - start) - 1
            rounds.append((s, t - start, min(accepted[t], most)))
            t += rounds[-1][2] + 1
    log = replay(trace, policy, cost_table(trace, COST), log=True).rounds
    assert [(s, t, accepted) for s, t, _, accepted, *_ in log.rows()] == rounds
    full = log.t + policy.max_draft_tokens < trace.budget_tokens[log.sequence]
    assert (
        full.any()
        and (log.drafted[full] == policy.max_verified_nodes).all()
        and (log.verified[full] == policy.max_verified_nodes).all()
    )


def test_a_sparse_tree_learns_the_best_tree_of_its_size(trace: Any) -> None:
    assert (
        needs_fitting(SparseTree)
        and needs_fitting(OptimalTree)
        and not needs_fitting(VCT)
        and not needs_fitting(Cartesian)
    )
    table = cost_table(trace, COST)
    rates = rates_of(trace)
    for nodes in (1, 7, 30):
        policy = fit(SparseTree, {"nodes": nodes}, trace, table)
        assert policy.shape == best_trees(rates, nodes).shape(nodes)
        assert fit(SparseTree, policy.settings, trace.select([0]), table) == policy  # what is given stays
    flat = fit(SparseTree, {"nodes": 20, "max_depth": 2}, trace, table)
    assert flat.max_draft_tokens == 2 and flat.shape == best_trees(rates[:2], 20).shape(20)
    assert fit(SparseTree, {"nodes": 500, "max_depth": 1}, trace, table).shape == (10, *[0] * 10)


def test_an_optimal_tree_learns_the_fastest(trace: Any) -> None:
    table = cost_table(trace, COST)
    cost = tree_round_cost(table, trace)
    for limits in ({"max_nodes": 12, "max_depth": 16}, {"max_nodes": 30, "max_depth": 2}):
        policy = fit(OptimalTree, limits, trace, table)
        assert policy.shape == optimal_tree(rates_of(trace), cost, **limits).shape
        assert policy.max_verified_nodes <= limits["max_nodes"] and policy.max_draft_tokens <= limits["max_depth"]
        assert fit(OptimalTree, policy.settings, trace.select([0]), table) == policy


def test_a_learned_tree_beats_the_dense_ones_on_other_text(trace: Any) -> None:
    other = drawn_trace(RATES, [400] * 10, seed=9)
    table = cost_table(other, COST)

    def seconds(policy: StaticTree) -> float:
        return float(replay(other, policy, table).seconds.sum())

    learned = fit(SparseTree, {"nodes": 39, "max_depth": 3}, trace, cost_table(trace, COST))
    assert learned.max_verified_nodes == 39
    assert seconds(learned) < seconds(VCT(width=3, depth=3))  # 39 nodes, 3 deep
    fastest = fit(OptimalTree, {"max_nodes": 39}, trace, cost_table(trace, COST))
    assert seconds(fastest) < 1.01 * seconds(learned)


@pytest.mark.parametrize("kind", [SparseTree, OptimalTree])
def test_without_ranks_nothing_is_learned(kind: type[StaticTree], trace: Any) -> None:
    refusal(lambda: fit(kind, {}, small_trace(), cost_table(trace, COST)), "true_rank")
