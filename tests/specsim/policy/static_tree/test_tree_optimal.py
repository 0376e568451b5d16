"""The hardware-optimal tree: the optimum of all trees where it claims that, priced as the replay does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost, CostModel
from specsim.io.errors import InputError
from specsim.learn.fit import fit
from specsim.policy.static_tree import shape as shapes
from specsim.policy.static_tree.optimal import TreeRoundCost, optimal_tree, optimal_trees, price, tree_round_cost
from specsim.policy.static_tree.rates import rates_of
from specsim.policy.static_tree.search import best_trees
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.tree_cases import all_trees, drawn_trace

RATES = np.array([[0.6, 0.2, 0.1], [0.5, 0.25, 0.1], [0.55, 0.2, 0.05], [0.5, 0.2, 0.1], [0.45, 0.2, 0.1]])


@dataclass(frozen=True)
class TreeCost(CostModel):
    """A cost model in which every part of a round with a tree counts, in seconds."""

    slope: float = 3e-7  # per cached token

    @property
    def max_tree_tokens(self) -> int:
        return 80

    def draft(self, n_tokens: int, context: Any) -> Any:
        return n_tokens * (1e-3 + self.slope * np.asarray(context)) + 2e-4 * (n_tokens > 1)

    def catch_up(self, context: Any) -> Any:
        return 4e-4 + self.slope * np.asarray(context)

    def verify(self, n_tokens: int, context: Any) -> Any:
        return 1e-2 + self.slope * np.asarray(context)

    def autoregressive_step(self, context: Any) -> Any:
        return 9e-3 + self.slope * np.asarray(context)

    def wider(self, n_nodes: int, context: Any) -> Any:
        return 2e-4 * (n_nodes - 1) + self.slope * np.asarray(context) * (n_nodes > 1)

    def tree_verify(self, n_tokens: int, context: Any) -> Any:
        return 1e-2 + 1e-4 * n_tokens**1.2 + self.slope * np.asarray(context)

    def tree_policy_step(self) -> float:
        return 2e-5

    def tree_round_overhead(self) -> float:
        return 4e-4


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
    table = cost_table(trace, TreeCost())
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
    cost, model = tree_round_cost(cost_table(trace, TreeCost()), trace), TreeCost()
    middle = np.repeat(trace.prompt_tokens - 1, trace.output_tokens) + trace.position
    middle = np.minimum((middle // 16 + 0.5) * 16, middle.max())  # the table's columns
    assert cost.verify_s[7] == pytest.approx(model.tree_verify(7, middle).mean(), rel=1e-3)
    assert cost.draft_s[3] == pytest.approx(model.draft(3, middle).mean(), rel=1e-3)
    assert cost.draft_s[0] == 0 and cost.wider_s[1] == 0
    assert cost.wider_s[5] == pytest.approx(model.wider(5, middle).mean(), rel=1e-3)
    assert cost.catch_up_s == pytest.approx(model.catch_up(middle).mean(), rel=1e-3)
    assert (cost.policy_step_s, cost.round_overhead_s) == (2e-5, 4e-4)


def test_costs_of_chains_alone_are_refused() -> None:
    trace = drawn_trace(RATES, [40])
    table = replace(cost_table(trace, ConstantCost(1e-3, 1e-2)), tree=None)
    with pytest.raises(InputError, match="do not price trees"):
        tree_round_cost(table, trace)
