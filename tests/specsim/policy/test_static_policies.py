"""Static trees as policies: their shapes, what they learn, and that replays accept what the shape says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn.fit import fit, needs_fitting
from specsim.learn.search import find_best
from specsim.learn.settings import SearchSettings
from specsim.policy.base import build_policy
from specsim.policy.static_tree import shape as shapes
from specsim.policy.static_tree.optimal import optimal_tree, tree_round_cost
from specsim.policy.static_tree.rates import rates_of
from specsim.policy.static_tree.search import best_trees
from specsim.policy.tree.base import new_tree
from specsim.policy.tree.cartesian import Cartesian
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.policy.tree.static import StaticTree, check_shape
from specsim.policy.tree.vct import VCT
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.reference import small_trace
from tests.support.tree_cases import drawn_trace

KINDS: tuple[type[StaticTree], ...] = (VCT, Cartesian, SparseTree, OptimalTree)
COST = ConstantCost(1e-3, 1e-2)
RATES = np.array([[0.6, 0.2, 0.1], [0.5, 0.25, 0.1], [0.55, 0.2, 0.05], [0.5, 0.2, 0.1], [0.45, 0.2, 0.1]])


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
    assert policy.static and not policy.adapts and policy.features == ("true_rank",)
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
    with pytest.raises(InputError, match=complaint):
        build_policy(kind, settings)


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_tuned(trace: Any, kind: type[StaticTree]) -> None:
    search_result = find_best(kind, PricedTrace(trace, COST), SearchSettings(trials=12, jobs=1))
    assert isinstance(search_result.best, kind) and search_result.best.max_draft_tokens <= trace.depth


@pytest.mark.parametrize("kind", [SparseTree, OptimalTree])
def test_without_ranks_nothing_is_learned(kind: type[StaticTree], trace: Any) -> None:
    with pytest.raises(InputError, match="true_rank"):
        fit(kind, {}, small_trace(), cost_table(trace, COST))
