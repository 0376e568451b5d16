"""HardwarePCT compared with brute force, with full records, and with tuned PCT and EAGLE-2 on held-out text."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cost.model import CostModel
from specsim.cost.table import CostTable, autoregressive_seconds
from specsim.io.errors import InputError
from specsim.learn.fit import fit
from specsim.learn.tree_stopping import TreeCost, min_gains
from specsim.policy.base import build_policy
from specsim.policy.estimates.node_value import (
    KNOTS,
    best_expanded,
    best_kept,
    gain_s,
    irrelevance_bound,
    min_useful_path_prob,
)
from specsim.policy.tree.base import UNKNOWN, Tree, TreePolicy, close_kept, new_tree
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.hardware_pct import NEVER, HardwarePCT
from specsim.policy.tree.pct import PCT
from specsim.replaying.oracles import tree_oracle_seconds
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import FlatCost
from tests.support.tree_traces import tree_trace


@dataclass(frozen=True)
class TreeCostModel(FlatCost):
    """Flat costs, and costs of another node in a draft pass and of every `tile` verified nodes."""

    catch_up_s: float = 3e-4
    per_token: float = 2e-5
    ask: float = 2e-5
    overhead: float = 4e-4
    extra_s: float = 5e-6
    tile: int = 1000
    tile_s: float = 4e-4
    max_tree_tokens = 256

    def verify(self, n_tokens: int, context: Any) -> Any:
        return super().verify(n_tokens, context) + (n_tokens - 1) // self.tile * self.tile_s

    def wider(self, n_nodes: int, context: Any) -> Any:
        return (n_nodes - 1) * self.extra_s + np.zeros(np.shape(context))


FLAT = TreeCostModel()  # as on a GPU
TILES = TreeCostModel(per_token=1e-5, tile=16)
STEEP = TreeCostModel(per_token=1e-3, extra_s=1e-4)  # as on a CPU
HOPELESS = TreeCostModel(step_s=2e-2, per_token=2e-3)


@cache
def world(**options: float) -> tuple[Trace, Trace]:
    trace = tree_trace(5, 60, 150, 8, 6, 96, 16, **options)
    return trace.select(range(30)), trace.select(range(30, 60))


@cache
def fitted(cost: CostModel) -> HardwarePCT:
    train, _ = world()
    return fit(HardwarePCT, {}, train, cost_table(train, cost))


def random_tree(rng: np.random.Generator, nodes: int) -> Tree:
    """A drafted tree with this number of nodes and the root, in level order."""
    tree = new_tree()
    parents = [0]
    for node in range(1, nodes + 1):
        parents.append(int(rng.integers(parents[-1], node)))
    for node in range(1, nodes + 1):
        parent = parents[node]
        tree.parent[node], tree.depth[node] = parent, tree.depth[parent] + 1
        tree.rank[node] = sum(p == parent for p in parents[1:node])
        tree.prob[node] = rng.choice([rng.random(), 1.0, 0.5])
        tree.path[node] = tree.path[parent] * tree.prob[node]
    return tree


VERIFY_S = st.lists(st.floats(0, 0.5), min_size=12, max_size=12).map(
    lambda steps: (1.0, *(1 + np.cumsum(steps)).tolist())
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 9),
    most=st.integers(1, 12),
    verify_s=VERIFY_S,
    time_per_token_s=st.floats(0.1, 3),
)
def test_it_keeps_the_best_subtree_of_the_drafted_tree(
    seed: int, nodes: int, most: int, verify_s: tuple[float, ...], time_per_token_s: float
) -> None:
    """Compared with every set of nodes that is closed under parents, for random verification costs."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, nodes)
    weights = (rng.normal(), rng.uniform(0.3, 1.5), *rng.normal(size=4) / 3)
    policy = HardwarePCT(
        max_nodes=most, time_per_token_s=time_per_token_s, verify_s=verify_s, weights=weights, scale=1e9
    )
    keep = np.zeros(nodes + 1, dtype=np.bool_)
    keep[0] = True
    assert policy.select(policy.initial_state(policy.params), policy.params, tree, nodes + 1, keep) == np.inf
    chosen = keep.copy()
    close_kept(tree, nodes + 1, keep)
    assert np.array_equal(chosen, keep)  # already closed

    def surplus_s(which: tuple[int, ...]) -> float:
        return time_per_token_s * sum(tree.value[node] for node in which) - verify_s[len(which)]

    best_s = -np.inf
    for bits in range(2**nodes):
        which = tuple(node for node in range(1, nodes + 1) if bits >> (node - 1) & 1)
        if len(which) <= most and all(tree.parent[node] in (0, *which) for node in which):
            best_s = max(best_s, surplus_s(which))
    assert surplus_s(tuple(np.flatnonzero(keep)[1:].tolist())) == pytest.approx(best_s, abs=1e-9)
    assert (tree.value[1 : nodes + 1] <= tree.value[tree.parent[1 : nodes + 1]]).all()


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.floats(0, 1), max_size=8).map(lambda v: np.sort(np.array(v))[::-1].copy()),
    verify_s=VERIFY_S,
    time_per_token_s=st.floats(0.1, 3),
    more=st.integers(1, 30),
)
def test_the_irrelevance_bound_holds(
    values: np.ndarray, verify_s: tuple[float, ...], time_per_token_s: float, more: int
) -> None:
    verify = np.array(verify_s)
    best, _ = best_kept(values, time_per_token_s, verify)
    small = irrelevance_bound(values, best, time_per_token_s, verify)
    crowd = np.sort(np.concatenate([values, np.full(more, small * (1 - 1e-6))]))[::-1]
    count, _ = best_kept(crowd, time_per_token_s, verify)
    assert count == best and np.array_equal(crowd[:best], values[:best])
    if 0 < best < len(verify) - 1:  # the bound is tight: as many nodes as possible, twice as likely, do matter
        crowd = np.sort(np.concatenate([values, np.full(len(verify), 2 * small + 1e-6)]))[::-1]
        count, _ = best_kept(crowd, time_per_token_s, verify)
        assert count != best or not np.array_equal(crowd[:best], values[:best])


def test_the_best_number_of_nodes_is_expanded() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        gains = np.sort(rng.exponential(size=rng.integers(0, 7)))[::-1]
        extra_nodes_s = np.concatenate([[0.0, 0.0], np.cumsum(rng.exponential(size=5))])
        totals = [
            0.0,
            *(gains[:e].sum() - extra_nodes_s[e] for e in range(1, len(gains) + 1) if e < len(extra_nodes_s)),
        ]
        count, total = best_expanded(gains, extra_nodes_s)
        assert total == pytest.approx(max(totals)) and totals[count] == pytest.approx(total)


def test_a_level_is_expanded_where_its_children_are_worth_the_least_of_its_depth() -> None:
    """Path probabilities 0.5, 0.3 and 0.005 with a gain of 0.4 per unit: 0.32 in sum, the last below the minimum."""
    tree = new_tree()
    for node, p in enumerate((0.5, 0.3, 0.005), start=1):
        tree.prob[node] = tree.path[node] = p
        tree.depth[node], tree.rank[node], tree.parent[node] = 1, node - 1, 0
    for least_s, extra_nodes_s, expected in (
        (0.31, 0.0, [3, 3, 0]),
        (0.33, 0.0, [0, 0, 0]),
        (0.19, 0.13, [3, 0, 0]),
        (0.21, 0.13, [0, 0, 0]),
    ):
        policy = HardwarePCT(
            width=3, gains=(0.4,) * 2 * KNOTS, min_gain_s=(0.0, least_s), extra_nodes_s=(0.0, 0.0, extra_nodes_s, 9.0)
        )
        widths = np.zeros(4, dtype=np.int32)
        state = policy.expand(policy.initial_state(policy.params), policy.params, tree, 0, 1, 0.5, widths)
        assert widths.tolist() == [3, 0, 0, 0]
        widths[:] = 0
        policy.expand(state, policy.params, tree, 1, 4, 0.5, widths)
        assert widths[1:].tolist() == expected
    assert policy.max_expanded == 3


def test_gains_are_interpolated_in_the_log_of_the_path() -> None:
    edges, gains = np.array([0.5]), np.concatenate([np.zeros(KNOTS), np.linspace(0, 12, KNOTS)])
    assert gain_s(1.0, 0.4, edges, gains) == 0 and gain_s(1.0, 0.6, edges, gains) == 12
    assert gain_s(np.exp(-3.1), 0.6, edges, gains) == pytest.approx(np.exp(-3.1) * 5.8)
    assert gain_s(np.exp(-50.0), 0.6, edges, gains) == 0


def test_nodes_without_gain_are_below_the_useful_path_probability() -> None:
    for first in range(KNOTS):
        gains = np.zeros((3, KNOTS))
        gains[first % 3, first:] = 1.0
        edge = min_useful_path_prob(gains.ravel())
        own, edges = (first % 3 + 0.5) / 3, np.array([1 / 3, 2 / 3])
        assert (edge == 0) == (first == 0)
        assert first == 0 or gain_s(0.999 * edge, own, edges, gains.ravel()) == 0
        assert gain_s(1.001 * edge + 1e-9, own, edges, gains.ravel()) > 0
    assert min_useful_path_prob(np.zeros(2 * KNOTS)) == 1 and min_useful_path_prob(np.ones(2 * KNOTS)) == 0


def test_the_minimum_gain_is_the_best_threshold() -> None:
    """For a tree of two levels, no other threshold has a larger mean value over the rounds."""
    rng = np.random.default_rng(1)
    cost = TreeCost(np.array([0.1, 0.3]), np.zeros(3), np.zeros(3), 0.05)
    predicted_gain_s = np.stack([np.ones(400), rng.random(400)], axis=1)
    best_value_s = np.cumsum(
        np.stack([np.zeros(400), np.ones(400), predicted_gain_s[:, 1] + rng.normal(size=400)], axis=1), axis=1
    )
    extra_s = np.stack([np.zeros(400), 0.1 * rng.random(400)], axis=1)
    limits = min_gains(predicted_gain_s, extra_s, best_value_s, cost)

    def mean_s(threshold: float) -> float:
        on = predicted_gain_s[:, 1] >= threshold
        return float(np.where(on, best_value_s[:, 2] - 0.3 - extra_s[:, 1], best_value_s[:, 1]).mean())

    assert limits[0] == 0
    assert mean_s(limits[1]) == pytest.approx(
        max(mean_s(x) for x in [*predicted_gain_s[:, 1].tolist(), NEVER]), abs=1e-12
    )
    expensive = dataclasses.replace(cost, pass_s=np.array([3.0, 9.0]))
    assert min_gains(predicted_gain_s, extra_s, best_value_s, expensive).tolist() == [NEVER, NEVER]


@cache
def short_texts(nodes: int) -> Trace:
    """Sequences of 1 or 2 rounds, so that a truncated round affects few others, with so many recorded nodes."""
    return tree_trace(7, sequences=500, tokens=8, depth=4, width=4, nodes=nodes, overconfidence=1.3, hidden=0.3)


@pytest.mark.parametrize(
    "cost", [pytest.param(FLAT, marks=pytest.mark.slow), TILES, pytest.param(STEEP, marks=pytest.mark.slow)]
)
def test_rounds_not_counted_as_truncated_are_as_with_a_full_record(cost: CostModel) -> None:
    whole = short_texts(340)
    assert (whole.tree.horizon == 0).all()
    table = cost_table(whole, cost)
    for policy in (
        fit(HardwarePCT, {"max_nodes": 20}, whole, table),
        fit(HardwarePCT, {"max_nodes": 200, "min_path_prob": 0.05}, whole, table),
    ):
        real = replay(whole, policy, table, log=True)
        assert not real.truncated.any()
        exact_sequences, truncated_sequences, changed = 0, 0, 0
        for nodes in (6, 16, 40, 120):
            short = dataclasses.replace(whole, tree=short_texts(nodes).tree)
            result = replay(short, policy, table, log=True)
            exact = result.truncated == 0
            np.testing.assert_array_equal(result.seconds[exact], real.seconds[exact])
            assert rounds_in(result, exact) == rounds_in(real, exact)
            changed += int((result.seconds != real.seconds).any(axis=1).sum())
            truncated_sequences += int((~exact).sum())
            exact_sequences += int(exact.sum())
        assert exact_sequences > 100 and truncated_sequences > 100 and changed > 20


def rounds_in(result: Replay, which: np.ndarray) -> list[tuple[int, ...]]:
    """Rounds of these sequences."""
    return result.rounds[which[result.rounds.sequence]].rows()


def test_an_unknown_node_is_neither_expanded_nor_kept() -> None:
    tree = new_tree()
    for node, p in enumerate((0.6, UNKNOWN), start=1):
        tree.prob[node] = tree.path[node] = p
        tree.depth[node], tree.rank[node], tree.parent[node] = 1, node - 1, 0
    policy = HardwarePCT(width=2)
    widths, keep = np.zeros(3, dtype=np.int32), np.array([True, False, False])
    state = policy.expand(policy.initial_state(policy.params), policy.params, tree, 0, 1, 0.5, widths)
    widths[:] = 0
    state = policy.expand(state, policy.params, tree, 1, 3, 0.5, widths)
    assert widths.tolist() == [0, 2, 0]
    floor = policy.select(state, policy.params, tree, 3, keep)
    assert keep.tolist() == [True, True, False] and 0 < floor <= policy.min_path_prob


def test_nothing_is_drafted_if_speculation_does_not_pay() -> None:
    train, holdout = (part.select(range(10)) for part in world())
    policy = fit(HardwarePCT, {}, train, cost_table(train, HOPELESS))
    result = replay(holdout, policy, cost_table(holdout, HOPELESS))
    assert policy.min_gain_s[0] == NEVER
    assert result.drafted.sum() == 0 and np.array_equal(result.num_rounds, result.output_tokens)


def test_a_fitted_policy_survives_json_and_is_not_fitted_again() -> None:
    train, _ = world()
    policy = fitted(FLAT)
    stored = json.loads(json.dumps(policy.settings))
    assert build_policy(HardwarePCT, stored) == policy
    assert fit(HardwarePCT, stored, train, cost_table(train, STEEP)) == policy
    assert str(policy).startswith("hardware_pct(") and "weights" not in str(policy)


def test_default_bounds_are_those_of_the_trace() -> None:
    trace = tree_trace(1, sequences=6, tokens=30)
    policy = fit(HardwarePCT, {}, trace, cost_table(trace, FLAT))
    assert (policy.width, policy.max_depth) == (4, 5)
    with pytest.raises(InputError, match="record wider"):
        fit(HardwarePCT, {"width": 6}, trace, cost_table(trace, FLAT))
    with pytest.raises(InputError, match="--tree-nodes"):
        fit(HardwarePCT, {}, trace, dataclasses.replace(cost_table(trace, FLAT), tree=None))


def test_tables_that_do_not_fit_each_other_are_refused() -> None:
    for wrong in (
        {"weights": (1.0,)},
        {"gains": (1.0,)},
        {"verify_s": (1.0,) * 9},
        {"edges": (0.6, 0.5)},
        {"extra_nodes_s": (0.0,)},
    ):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} has to hold"):
            HardwarePCT(**wrong)


def test_the_defaults_speculate_with_profit() -> None:
    _, holdout = world()
    table = cost_table(holdout, TreeCostModel(step_s=5e-2, pass_s=1.0, per_token=5e-3))
    assert replay(holdout, HardwarePCT(width=6, max_depth=8), table).speedup > 1.4


def rivals(kind: type[TreePolicy], every: int) -> Iterator[TreePolicy]:
    """Every `every`-th policy of a grid of settings."""
    grids: dict[type[TreePolicy], Iterator[TreePolicy]] = {
        PCT: (
            PCT(cost_ratio=c, leaf_threshold=leaf, width=w, max_depth=8, test=test)
            for c, leaf, w, test in itertools.product(
                [0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.2],
                [0.003, 0.01, 0.03, 0.1, 0.2, 0.3],
                [2, 4, 6],
                ["node", "level"],
            )
        ),
        Eagle2: (
            Eagle2(nodes=n, depth=d, top_k=k)
            for n, d, k in itertools.product(
                [2, 4, 6, 8, 12, 16, 24, 32, 48, 64], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 6]
            )
        ),
    }
    return itertools.islice(grids[kind], 0, None, every)


def fastest(policies: Iterator[TreePolicy], trace: Trace, table: CostTable) -> TreePolicy:
    return min(policies, key=lambda policy: replay(trace, policy, table).speculative_s.sum())


def compare(cost: CostModel, every: int, **options: float) -> None:
    train, holdout = world(**options)
    table = cost_table(train, cost)
    ours = fit(HardwarePCT, {}, train, table)
    held = cost_table(holdout, cost)
    result = replay(holdout, ours, held)
    assert result.speedup > 1
    assert (tree_oracle_seconds(holdout, held) <= result.speculative_s).all()
    for kind in (PCT, Eagle2):
        rival = replay(holdout, fastest(rivals(kind, every), train, table), held)
        assert result.speedup >= rival.speedup


@pytest.mark.parametrize("cost", [TILES, STEEP], ids=["tiles", "steep"])
def test_on_held_out_text_it_is_at_least_as_fast_as_tuned_rivals(cost: CostModel) -> None:
    compare(cost, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("cost", [FLAT, TILES, STEEP, TreeCostModel(step_s=3e-3, extra_s=2e-5)])
@pytest.mark.parametrize("hidden", [0.0, 0.4])
@pytest.mark.parametrize("overconfidence", [1.0, 1.6])
def test_on_any_text_it_is_at_least_as_fast_as_tuned_rivals(
    cost: CostModel, hidden: float, overconfidence: float
) -> None:
    compare(cost, every=1, hidden=hidden, overconfidence=overconfidence)


def test_the_fit_is_deterministic_and_faster_than_plain_decoding() -> None:
    """Its value of a token is close to the time per token that it reaches."""
    train, _ = world()
    table = cost_table(train, FLAT)
    policy = fitted(FLAT)
    assert fit(HardwarePCT, {"width": 6, "max_depth": 8}, train, table) == policy
    result = replay(train, policy, table)
    reached_s = result.speculative_s.sum() / result.output_tokens.sum()
    assert policy.time_per_token_s == pytest.approx(reached_s, rel=0.05)
    assert result.speculative_s.sum() < 0.6 * autoregressive_seconds(train, table).sum()
