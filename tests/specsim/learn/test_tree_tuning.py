"""Tree policies in the tuner and on the leaderboard, beside chains and at the same account of costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specsim.compare.board import Board
from specsim.compare.document import as_document
from specsim.compare.leaderboard import leaderboards
from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost, TreeProfile
from specsim.io.errors import InputError
from specsim.learn.evaluate import MAX_TRUNCATED_SHARE
from specsim.learn.search import find_best
from specsim.learn.settings import SearchSettings
from specsim.learn.space import recorded_limits, search_space
from specsim.learn.tune import tune_on
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES, TREE_POLICIES
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds, tree_oracle_seconds
from specsim.replaying.prediction import ladder, predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.report.leaderboard import leaderboard_result
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from tests.specsim.replaying.test_tree_replay import LeafyCost
from tests.support.tree_traces import tree_trace

COST = LeafyCost()
PROFILE = ProfileCost(
    contexts=np.array([0, 200]),
    draft_step_s=np.full((4, 2), 1e-3),
    catch_up_s=np.zeros(2),
    verify_s=np.full((5, 2), 1e-2),
    autoregressive_s=np.full(2, 1e-2),
    policy_step_s=0.0,
    round_overhead_s=0.0,
    tree=TreeProfile(np.array([1, 400]), np.zeros((2, 2)), np.full((2, 2), 1e-2), 0.0, 0.0),
)
TREES = ("vct", "cartesian", "sparse_tree", "cape", "eagle2", "pct")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return tree_trace(5, sequences=12, tokens=50, depth=6, width=10, nodes=400, vocabulary=20, easiness=2.5)


@pytest.fixture(scope="module")
def board(trace: Trace) -> Board:
    kinds = [POLICIES[name] for name in ("fixed_k", "max_confidence", *TREES)]
    return leaderboards({"trees": trace}, [COST], kinds=kinds, trials=9, replays=2)[0]


def test_chains_and_trees_share_a_board_and_an_oracle(board: Board, trace: Trace) -> None:
    assert {row.policy.name for row in board.rows} == {"fixed_k", "max_confidence", *TREES} and not board.skipped
    _, held = split_sequences(trace)
    holdout = trace.select(held)
    table = cost_table(holdout, COST)
    bound_s = np.minimum(chain_oracle_seconds(holdout, table), tree_oracle_seconds(holdout, table))
    assert board.oracle == ratio_interval(board.baseline_s, bound_s)
    for row in board.rows:
        result = replay(holdout, row.policy, cost_table(holdout, COST, row.policy))
        np.testing.assert_allclose(row.speculative_s, result.speculative_s, rtol=1e-12)
        assert row.mean_length == pytest.approx(result.verified.sum() / result.num_rounds.sum())
        assert row.prediction.oracle_regret > 0
        share = 0.0 if result.truncated is None else result.truncated.sum() / result.num_rounds.sum()
        assert row.as_dict()["truncated_share"] == pytest.approx(share)


@pytest.mark.parametrize("name", [name for name, kind in TREE_POLICIES.items() if "score" not in kind.features])
def test_a_search_finds_no_worse_than_the_defaults(trace: Trace, name: str) -> None:
    kind = TREE_POLICIES[name]
    tuning, held = split_sequences(trace)
    tuned = tune_on(
        kind,
        PricedTrace(trace.select(tuning), COST),
        PricedTrace(trace.select(held), COST),
        SearchSettings(trials=8),
    )
    default = tuned.references["default"].prediction
    assert type(tuned.best) is kind and tuned.best.max_draft_tokens <= trace.depth
    on_tuning = replay(trace.select(tuning), default.policy, cost_table(trace.select(tuning), COST, default.policy))
    assert tuned.train.speedup.estimate >= on_tuning.speedup - 1e-12
    assert isinstance(tuned.references["best_fixed_k"].prediction.policy, FixedK)


def test_a_default_deeper_than_the_trace_leaves_the_other_settings_free() -> None:
    """PCT drafts ten deep by default; on a shallower trace that must not pin its width."""
    widths = next(axis for axis in search_space(POLICIES["pct"], {}, {"depth": 3}).axes if axis.name == "width")
    assert list(widths.values or ()) == list(range(1, 9)) and widths.default == 5


def test_costs_without_trees_leave_trees_out(trace: Trace) -> None:
    class Chains(ConstantCost):
        @property
        def max_tree_tokens(self) -> int:
            return 0

    kinds = [POLICIES[name] for name in ("fixed_k", "vct", "pct")]
    board = leaderboards({"t": trace}, [Chains(1.0, 9.0)], kinds=kinds, trials=4, sensitivity=False)[0]
    assert {row.policy.name for row in board.rows} == {"fixed_k"}
    assert {name for name, _ in board.skipped} == {"vct", "pct"} and "tree-nodes" in board.skipped[0][1]


def test_a_wider_tree_wins_where_verification_is_free_and_loses_where_it_is_dear(trace: Trace) -> None:
    free, dear = ConstantCost(1e-4, 1.0), LeafyCost(slope=0.0)
    chosen = {
        name: find_best(POLICIES["eagle2"], PricedTrace(trace, cost), SearchSettings(trials=60)).best
        for name, cost in (("free", free), ("dear", dear))
    }
    assert chosen["free"].settings["nodes"] > chosen["dear"].settings["nodes"]


def test_points_that_the_record_is_too_small_for_are_refused() -> None:
    """Left in, they would look fast: what is not recorded cannot be paid for in full."""
    small = tree_trace(5, sequences=12, tokens=50, depth=6, width=10, nodes=12, vocabulary=20, easiness=2.5)
    search_result = find_best(POLICIES["eagle2"], PricedTrace(small, COST), SearchSettings(trials=40))
    assert 0 < search_result.refused < search_result.trials
    result = replay(small, search_result.best, cost_table(small, COST, search_result.best))
    assert result.truncated.sum() <= MAX_TRUNCATED_SHARE * result.num_rounds.sum()
    with pytest.raises(InputError, match="all 1 points ask for more.*tree-nodes"):
        find_best(
            POLICIES["eagle2"], PricedTrace(small, COST), SearchSettings(fixed={"nodes": 50, "depth": 6, "top_k": 10})
        )


def test_the_oracle_bounds_static_trees_wider_than_the_record() -> None:
    trace = tree_trace(1, sequences=6, tokens=40, depth=4, width=2, nodes=20, vocabulary=14)
    prediction = predict_policy(PricedTrace(trace, COST), POLICIES["cartesian"](s1=12, s2=12))
    assert prediction.oracle_regret > 0
    assert ladder(trace, prediction.policy, PROFILE).eq14 is None


def test_ranges_are_lowered_to_the_recorded_width_and_nodes_and_to_what_costs_cover() -> None:
    """Otherwise most of a search's points would ask for more than is recorded, and be refused."""

    class Covering(ConstantCost):
        @property
        def max_tree_tokens(self) -> int:
            return 21

    narrow = tree_trace(6, sequences=6, tokens=30, depth=6, width=4, nodes=40, vocabulary=20, easiness=2.5)
    for cost, nodes in ((COST, 40), (Covering(1.0, 9.0), 20)):
        axes = {
            (name, axis.name): axis
            for name in ("eagle2", "pct", "beta_ts_tree", "cape")
            for axis in search_space(POLICIES[name], {}, recorded_limits(PricedTrace(narrow, cost))).axes
        }
        for key in (("eagle2", "top_k"), ("pct", "width"), ("beta_ts_tree", "width"), ("cape", "width_30")):
            assert axes[key].high == 4, key
        assert axes["eagle2", "nodes"].high == axes["beta_ts_tree", "nodes"].high == nodes
        for name in ("eagle2", "pct"):
            priced = PricedTrace(narrow, cost)
            tuned = find_best(POLICIES[name], priced, SearchSettings(trials=20, jobs=1))
            assert tuned.refused == tuned.truncated  # nothing but settings whose speedup the record does not tell
            assert tuned.best.max_width <= 4 and tuned.best.max_verified_nodes <= nodes


def test_a_board_says_where_trees_could_not_be_judged() -> None:
    """12 nodes are recorded: EAGLE-2's published settings ask for 50, and wide tuned settings for more than 12.

    Speedups shown on the small record are those on a record of 300 nodes.
    """
    small, large = (
        tree_trace(5, sequences=12, tokens=50, depth=6, width=10, nodes=nodes, vocabulary=20, easiness=2.5)
        for nodes in (12, 300)
    )
    kinds = [POLICIES["fixed_k"], POLICIES["eagle2"]]
    boards = leaderboards({"small": small, "large": large}, [COST], kinds=kinds, trials=30)
    board = boards[0]
    published = "eagle2, 50 nodes, depth 6"
    assert published not in [row.label for row in board.rows]
    assert "asks for more than the recorded trees hold" in dict(board.skipped)[published]
    top_k = next(sweep for sweep in board.sweeps if sweep.setting == "top_k")
    assert top_k.truncated and not set(top_k.truncated) & set(top_k.values)
    document = as_document(boards[:1], {})
    headline = leaderboard_result(document).verdict
    assert "Trees could not be judged fully" in headline and published in headline
    assert board.warnings[0] in headline
    _, rest = split_sequences(large)
    for value, speedup in zip(top_k.values, top_k.speedups, strict=True):
        policy = dataclasses.replace(
            next(row.policy for row in board.rows if row.label == "eagle2, tuned"), top_k=value
        )
        full = predict_policy(PricedTrace(large.select(rest), COST), policy)
        assert speedup == pytest.approx(full.speedup.estimate, rel=0.02)
    assert boards[1].unjudged == "" or published not in boards[1].unjudged
