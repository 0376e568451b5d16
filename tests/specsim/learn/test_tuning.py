"""The search finds what an exhaustive one finds, reports what it did, and goes on from its file to the same answer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from specsim.compare.document import as_document
from specsim.compare.leaderboard import Board, leaderboards
from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.profile import ProfileCost
from specsim.io.errors import InputError
from specsim.learn import evaluate
from specsim.learn.evaluate import MAX_TRUNCATED_SHARE, Evaluator, evaluate_many
from specsim.learn.search import ASKED, SearchResult, find_best
from specsim.learn.settings import Search, SearchSettings
from specsim.learn.space import recorded_limits, search_space
from specsim.learn.storage import open_study, trace_digest
from specsim.learn.tune import TuneResult, tune_on
from specsim.policy.base import Policy, setting
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK, keep_drafting
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.chain.time_gain import TimeGain
from specsim.policy.memoryless import initial_state, update
from specsim.policy.registry import POLICIES, TREE_POLICIES
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds, tree_oracle_seconds
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.report.board import BoardOptions
from specsim.report.leaderboard import leaderboard_result
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from tests.specsim.replaying.test_tree_replay import LeafyCost
from tests.support import ROOT
from tests.support.reference import RampCost, small_trace
from tests.support.tree_traces import tree_trace
from tests.support.tuning_cases import CASES, DEPTH, carrying, run_case, stretchy_trace

SEARCHES = pytest.mark.parametrize("kind", ["grid", "optuna"])


def tuned(policy: type[Policy], trace: Trace | None = None, cost: CostModel | None = None, **how: Any) -> TuneResult:
    """Tune and report on the same trace, by default the small trace."""
    priced = PricedTrace(trace or small_trace(), cost or RampCost())
    return tune_on(policy, priced, priced, SearchSettings(**how))


def speedup_of(policy: Policy, trace: Trace | None = None, cost: CostModel | None = None) -> float:
    return PricedTrace(trace or small_trace(), cost or RampCost()).replay(policy).speedup


@SEARCHES
def test_a_countable_space_is_enumerated(kind: Search) -> None:
    depth, result = small_trace().depth, tuned(FixedK, trials=100, search=kind)
    speedups = {k: speedup_of(FixedK(k=k)) for k in range(1, depth + 1)}
    *_, second, best = sorted(speedups, key=lambda k: speedups[k])
    assert result.trials == depth and result.search == "grid"
    assert result.best == FixedK(k=best) and result.runner_up == FixedK(k=second)
    assert result.train.speedup.estimate == pytest.approx(speedups[best])


@SEARCHES
def test_tuned_settings_are_no_worse_than_the_defaults(kind: Search) -> None:
    result = tuned(AdaEDL, search=kind, trials=40, fixed={"dynamic": False})
    default = dataclasses.replace(AdaEDL(), dynamic=False, max_draft_tokens=small_trace().depth)
    assert result.trials <= 40 and result.search == kind
    if kind == "optuna":  # its first trial; a coarse grid may miss them
        assert result.train.speedup.estimate >= speedup_of(default) - 1e-12
    assert result.train.speedup.estimate == pytest.approx(speedup_of(result.best))
    assert result.references["default"].prediction.policy == default
    json.dumps(result.as_dict(), allow_nan=False)


def test_the_default_is_optuna() -> None:
    assert tuned(AdaEDL, trials=3).search == "optuna"


@pytest.mark.parametrize(
    ("policy", "how", "message"),
    [
        (FixedK, {"trials": 0}, "trials=0"),
        (FixedK, {"jobs": 0}, "jobs=0"),
        (FixedK, {"search": "random"}, "grid, optuna"),
        (FixedK, {"fixed": {"q": 1}}, "'q'"),
        (AdaEDL, {"fixed": {"max_draft_tokens": 7}, "trials": 5}, "depth 6"),
        # Without a cost table for each k, all k would cost as much, and the longest draft would win.
        (SpaceK, {"fixed": {"k": 3}, "cost": "profile to 8"}, "asked for"),
    ],
)
def test_bad_requests_are_refused(policy: type[Policy], how: dict[str, Any], message: str) -> None:
    cost = profile_to(8) if how.pop("cost", None) else None
    with pytest.raises(InputError, match=message):
        tuned(policy, cost=cost, **how)


@pytest.mark.parametrize("kind", CASES)
def test_the_answer_does_not_depend_on_threads(kind: Search) -> None:
    policy, trials = CASES[kind]
    priced = PricedTrace(stretchy_trace(30, 100), RampCost())
    settings = SearchSettings(search=kind, trials=trials, seed=5, jobs=1)
    assert find_best(policy, priced, settings) == find_best(policy, priced, dataclasses.replace(settings, jobs=3))


def profile_to(sizes: int) -> ProfileCost:
    """Verification measured up to so many tokens."""
    contexts = np.array([1, 512])
    verify_s = np.linspace(1e-2, 2e-2, sizes)[:, None] * np.ones(2)
    return ProfileCost(contexts, np.full((6, 2), 1e-3), np.zeros(2), verify_s, np.full(2, 1e-2), 1e-5, 1e-4)


def test_what_the_costs_cannot_price_is_passed_over() -> None:
    """SPACE verifies 1 + k(k + 2) tokens: 25 for k = 4, 36 for k = 5."""
    result = tuned(SpaceK, cost=profile_to(30), trials=20)
    assert result.refused == 2 and result.trials == 6 and result.best.settings["k"] <= 4
    speedups = {k: speedup_of(SpaceK(k), cost=profile_to(30)) for k in range(1, 5)}
    assert result.best == SpaceK(max(speedups, key=lambda k: speedups[k]))
    assert result.train.speedup.estimate == pytest.approx(max(speedups.values()))


@dataclasses.dataclass(frozen=True)
class Choosy(ChainPolicy):
    """Every kind of setting; only a single choice and truth value draft far."""

    k: int = setting(2, 1, 64, tune=(1, 12), bounds="depth")
    how: str = setting("short", choices=("short", "long"), tune=(0, 1))
    on: bool = setting(False, 0, 1, tune=(0, 1))
    weight: float = setting(2.0, 0.1, 10, tune=(0.5, 5.0), log=True)
    length: int = setting(3, 1, 4096, tune=(1, 4096), log=True)

    name, source = "choosy", "none"
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def max_draft_tokens(self) -> int:
        return self.k if self.how == "long" and self.on else 1


def test_the_space_of_every_kind_of_setting() -> None:
    space = search_space(Choosy, {"how": "long", "on": True}, {"depth": 6})
    assert [axis.name for axis in space.axes] == ["k", "weight", "length"]
    assert space.axes[0].values == range(1, 7)  # longer drafts are not recorded
    space = search_space(Choosy, {"weight": 1.0}, {"depth": 6})
    assert space.size == 12 * 2 * 2 * 4096 and space.default == {"k": 2, "how": "short", "on": False, "length": 3}
    points = space.sobol(200, seed=1)
    assert len(points) == 200 and points[0] == space.default and len({tuple(p.values()) for p in points}) == 200
    assert {p["how"] for p in points} == {"short", "long"} and {p["on"] for p in points} == {True, False}
    assert 40 < sum(p["length"] < 64 for p in points) < 160  # even in the logarithm
    assert [len(space.grid(n)) <= n for n in (1, 7, 100)] == [True] * 3
    assert len(space.grid(100)) >= 60 and space.grid(1) == [space.default]


def test_countable_values_get_equal_parts_of_a_range_and_logarithms_its_ratios() -> None:
    k, how, on, weight, length = search_space(Choosy, {}, {"depth": 12}).axes
    shares = (np.arange(120) + 0.5) / 120
    for axis in (k, how, on):
        assert axis.values is not None
        assert Counter(map(axis.at, shares)) == dict.fromkeys(axis.values, 120 // len(axis.values))
    assert weight.at(0.5) == pytest.approx(2.5**0.5) and length.at(0.5) == 64  # geometric means of the ends
    assert [axis.at(1.0) for axis in (k, how, on, length)] == [12, "long", True, 4096]
    assert [weight.at(share) for share in (0.0, 1.0)] == pytest.approx([0.5, 5.0])


@SEARCHES
def test_choices_and_truth_values_are_searched(kind: Search) -> None:
    nearly_free = ConstantCost(1e-4, 1e-2)
    best = tuned(Choosy, stretchy_trace(12, 60), nearly_free, search=kind, trials=120, fixed={"length": 1}).best
    assert best.max_draft_tokens >= 6 and best.settings["how"] == "long" and best.settings["on"] is True


def test_a_fitted_default_is_where_the_search_starts() -> None:
    result = tuned(TimeGain, stretchy_trace(12, 60), ConstantCost(1e-3, 1e-2), search="optuna", trials=1)
    assert result.best.settings["cost_ratio"] == pytest.approx(0.1)
    assert result.references["default"].prediction.policy == result.best
    assert not any("default" in warning for warning in result.warnings)


def test_what_is_reported_is_the_prediction_of_the_best() -> None:
    whole = PricedTrace(small_trace(), RampCost())
    train, holdout = whole.select([0, 1, 3]), whole.select([2, 4])
    result = tune_on(AdaEDL, train, holdout, SearchSettings(search="grid", trials=30, seed=4))
    assert result.holdout == predict_policy(holdout, result.best, seed=4)
    assert result.train == predict_policy(train, result.best, seed=4)


def test_insignificant_differences_are_warned_of() -> None:
    fixed = {"how": "short", "on": False, "length": 1}  # the other settings do nothing then
    result = tuned(Choosy, search="grid", trials=49, fixed=fixed)
    assert result.runner_up is not None and result.references["runner_up"].comparison.difference.estimate == 0
    assert any("not significant on 5 sequences" in text and "the runner-up" in text for text in result.warnings)


def test_significant_differences_are_not_warned_of() -> None:
    train, holdout = (PricedTrace(stretchy_trace(60, 400, seed=s), ConstantCost(2e-3, 1e-2)) for s in (0, 1))
    result = tune_on(AdaEDL, train, holdout, SearchSettings(trials=50))
    fixed_k = result.references["best_fixed_k"]
    assert fixed_k.comparison.significant and fixed_k.comparison.difference.low > 0
    assert not any("fixed K" in warning for warning in result.warnings)
    gain = result.holdout.speedup.estimate - fixed_k.prediction.speedup.estimate
    assert fixed_k.comparison.difference.estimate == pytest.approx(gain)


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("kind", CASES)
def test_the_first_ctrl_c_gives_the_best_so_far_and_the_second_aborts(kind: Search) -> None:
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)

    result = run_case(kind, 0, progress=stop)
    assert result.interrupted and calls == 2 and result.best.settings["max_draft_tokens"] == DEPTH

    class Stubborn(AdaEDL):
        @property
        def carries_state(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # before there is a result to report
        tuned(Stubborn, stretchy_trace(10, 40))


@pytest.mark.parametrize("jobs", [1, 2, 7])
@pytest.mark.parametrize("block", [1, 60, 1 << 14])
def test_every_configuration_equals_its_own_replay(monkeypatch: pytest.MonkeyPatch, jobs: int, block: int) -> None:
    monkeypatch.setattr(evaluate, "BLOCK_ROWS", block)
    trace, table = small_trace(), cost_table(small_trace(), RampCost())
    settings = [{"gamma": 0.1 * i, "lambda0": 0.3, "max_draft_tokens": i} for i in range(1, 8)]
    evaluated = evaluate_many(AdaEDL, settings, PricedTrace(trace, RampCost()), jobs=jobs)
    for i, policy in enumerate(evaluated.policies[:6]):
        assert policy.settings.items() >= settings[i].items()
        assert evaluated.speedup[i] == pytest.approx(replay(trace, policy, table).speedup, rel=1e-15)
    assert evaluated.policies[6] is None and "depth 6" in str(evaluated.reasons[6])  # deeper than recorded
    assert math.isinf(evaluated.seconds[6]) and evaluated.speedup[6] == 0 and evaluated.reasons[:6] == [None] * 6


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_carried_state_passes_through_all_sequences(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setattr(evaluate, "BLOCK_ROWS", 50)
    trace = stretchy_trace(9, 40)
    policies = carrying(trace)
    assert [policy.carries_state for policy in policies] == [True, False, False]
    seconds = Evaluator(HuggingFace, PricedTrace(trace, RampCost()), jobs=jobs).seconds(policies)
    table = cost_table(trace, RampCost())
    for policy, row in zip(policies, seconds, strict=True):
        np.testing.assert_array_equal(row, replay(trace, policy, table).speculative_s)


def test_nothing_to_evaluate() -> None:
    assert evaluate_many(AdaEDL, [], PricedTrace(small_trace(), RampCost())).speedup.shape == (0,)


FILE = "search.jsonl"


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Search, SearchResult, bytes]:
    """A search, its answer without a file, and the file of a run that nobody disturbed."""
    path = tmp_path_factory.mktemp("whole") / FILE
    undisturbed, stored = run_case(request.param, 7), run_case(request.param, 7, path)
    assert undisturbed == stored
    return request.param, undisturbed, path.read_bytes()


def studies(path: Path) -> list[optuna.Study]:
    """All studies in a file."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def tried(path: Path) -> list[Any]:
    """What the only study in a file tried, and what it found."""
    (study,) = studies(path)
    return [(trial.params, trial.state, trial.value) for trial in study.trials]


def test_a_file_torn_anywhere_leads_to_the_same_answer(
    whole: tuple[Search, SearchResult, bytes], tmp_path: Path
) -> None:
    search, answer, written = whole
    path = tmp_path / FILE
    path.write_bytes(written)
    undisturbed = tried(path)
    cuts = np.random.default_rng(0).integers(0, len(written), size=3).tolist()
    for cut in [0, 1, *cuts, len(written) - 1, len(written)]:
        path.write_bytes(written[:cut])
        assert run_case(search, 7, path) == answer, cut
        assert tried(path) == undisturbed, cut


def test_a_finished_search_replays_nothing(whole: tuple[Search, SearchResult, bytes], tmp_path: Path) -> None:
    search, answer, written = whole
    path = tmp_path / FILE
    path.write_bytes(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specsim.learn.evaluate.Evaluator.seconds", None)
        assert run_case(search, 7, path) == answer


@pytest.mark.parametrize(
    ("policy", "trace_seed", "cost", "changes"),
    [
        (AdaEDL, 1, RampCost(), {}),
        (AdaEDL, 0, RampCost(4e-7), {}),
        (AdaEDL, 0, RampCost(), {"trials": 10}),
        (AdaEDL, 0, RampCost(), {"seed": 1}),
        (AdaEDL, 0, RampCost(), {"search": "optuna"}),
        (MaxConfidence, 0, RampCost(), {}),
        (AdaEDL, 0, RampCost(), {"fixed": {"epsilon": 0.5}}),
    ],
    ids=["trace", "cost", "trials", "seed", "search", "policy", "fixed"],
)
def test_another_search_in_the_same_file_is_a_study_of_its_own(
    policy: type[ChainPolicy], trace_seed: int, cost: RampCost, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = SearchSettings(search="grid", trials=9, storage=tmp_path / FILE)
    first = find_best(AdaEDL, PricedTrace(small_trace(), RampCost()), settings)
    priced = PricedTrace(small_trace(trace_seed), cost)
    expected = find_best(policy, priced, dataclasses.replace(settings, storage=None, **changes))
    assert find_best(policy, priced, dataclasses.replace(settings, **changes)) == expected
    assert len(studies(tmp_path / FILE)) == 2
    assert find_best(AdaEDL, PricedTrace(small_trace(), RampCost()), settings) == first


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b"no line at all", b'{"kind": "profile"}\n', b"\xff\n"])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a journal of Optuna's"), open_study(path, "a"):
        pass
    assert path.read_bytes() == content


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with open_study(path, "a") as study:
        study.set_user_attr("n", 1)
        with pytest.raises(InputError, match="another process"), open_study(path, "a"):
            pass
    with open_study(path, "a") as study:
        assert study.user_attrs == {"n": 1}


@pytest.mark.parametrize(("whole", "damaged"), [(b'{"n":1}', b'{"n":1'), (b'"study_id"', b'"study"')])
def test_damage_inside_is_refused(tmp_path: Path, whole: bytes, damaged: bytes) -> None:
    path = tmp_path / FILE
    with open_study(path, "a") as study:
        study.set_user_attr("n", 1)
        study.set_user_attr("n", 2)
    path.write_bytes(path.read_bytes().replace(whole, damaged))
    with pytest.raises(InputError, match=r"is damaged .*delete it to search anew$"), open_study(path, "a"):
        pass


def test_digests_tell_traces_apart() -> None:
    trace = small_trace()
    digest = trace_digest(trace)
    assert trace.draft_limit.size > 0 and trace_digest(trace) == digest == trace_digest(small_trace())
    assert trace_digest(trace.select([0, 1, 2, 3])) != digest
    altered = small_trace()
    altered.entropy_nats[3, 2] += 1e-3
    assert trace_digest(altered) != digest


def test_optuna_proposes_alike_after_an_interruption() -> None:
    trace, cost = stretchy_trace(10, 50), ConstantCost(1e-3, 1e-2)
    runs = [
        find_best(AdaEDL, PricedTrace(trace, cost), SearchSettings(search="optuna", trials=30, seed=s))
        for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and ASKED < 30


PROCESS = """
import sys
from pathlib import Path
from tests.support.tuning_cases import run_case
run_case({search!r}, {seed}, Path({path!r}))
"""


def killed(search: Search, seed: int, path: Path, lines: int) -> bool:
    """Run a search in a process, kill it when its file has so many lines; whether it was still running."""
    code = PROCESS.format(search=search, seed=seed, path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < lines):
        time.sleep(0.001)
    running = process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() in (0, -signal.SIGKILL)
    return running


def kill_and_resume(search: Search, seed: int, path: Path, rng: np.random.Generator) -> bool:
    whole = path.with_name(f"whole-{path.name}")
    answer = run_case(search, seed, whole)
    running = killed(search, seed, path, int(rng.integers(len(whole.read_bytes().splitlines()))))
    assert run_case(search, seed, path) == answer
    lines = path.read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    return running


def test_a_killed_search_resumes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    running = [kill_and_resume(search, 3, tmp_path / search, rng) for search in CASES]
    assert any(running)


COST = LeafyCost()


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
        assert row.document({}).truncated_share == pytest.approx(share)


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
    board = leaderboards({"t": trace}, [Chains(1.0, 9.0)], kinds=kinds, trials=4)[0]
    assert {row.policy.name for row in board.rows} == {"fixed_k"}
    assert {name for name, _ in board.skipped} == {"vct", "pct"} and "tree-nodes" in board.skipped[0][1]


def test_a_wider_tree_wins_where_verification_is_free_and_loses_where_it_is_dear(trace: Trace) -> None:
    free, dear = ConstantCost(1e-4, 1.0), LeafyCost(slope=0.0)
    chosen = {
        name: find_best(POLICIES["eagle2"], PricedTrace(trace, cost), SearchSettings(trials=60)).best
        for name, cost in (("free", free), ("dear", dear))
    }
    assert chosen["free"].settings["nodes"] > chosen["dear"].settings["nodes"]


def test_trees_that_the_record_is_too_small_for_are_tried_smaller_or_refused() -> None:
    """Left in, they would look fast: what is not recorded cannot be paid for in full."""
    small = tree_trace(5, sequences=12, tokens=50, depth=6, width=10, nodes=12, vocabulary=20, easiness=2.5)
    search_result = find_best(POLICIES["eagle2"], PricedTrace(small, COST), SearchSettings(trials=40))
    assert search_result.refused == 0 < search_result.smaller < search_result.trials == 40
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
    assert prediction.eq14 is None


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
            for name in ("eagle2", "pct", "beta_ts_tree", "cali_ts_tree", "cape")
            for axis in search_space(POLICIES[name], {}, recorded_limits(PricedTrace(narrow, cost))).axes
        }
        for key in (("eagle2", "top_k"), ("pct", "width"), ("cali_ts_tree", "width"), ("cape", "width_30")):
            assert axes[key].high == 4, key
        assert axes["eagle2", "nodes"].high == axes["cali_ts_tree", "nodes"].high == nodes
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
    headline = leaderboard_result(as_document(boards[:1], BoardOptions()), []).verdict
    assert "Trees could not be judged fully" in headline and published in headline
    assert board.warnings[0] in headline
    assert boards[1].unjudged == "" or published not in boards[1].unjudged
