"""The search finds what an exhaustive search finds, and reports what it did."""

from __future__ import annotations

import dataclasses
import json
import signal
from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.profile import ProfileCost
from specsim.io.errors import InputError
from specsim.learn.search import find_best
from specsim.learn.settings import Search, SearchSettings
from specsim.learn.space import search_space
from specsim.learn.tune import TuneResult, cross_validate_with, tune_on
from specsim.policy.base import Policy, setting
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK, initial_state, keep_drafting, update
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.chain.time_gain import TimeGain
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import fold_sequences
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import CASES, DEPTH, run_case, stretchy_trace

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


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
def test_what_is_reported_is_the_prediction_of_the_best(mode: str) -> None:
    trace = small_trace(accept_prob=np.full((102, 6), 0.7, dtype=np.float32))
    whole = PricedTrace(dataclasses.replace(trace, meta={**trace.meta, "decoding": {"mode": mode}}), RampCost())
    train, holdout = whole.select([0, 1, 3]), whole.select([2, 4])
    result = tune_on(AdaEDL, train, holdout, SearchSettings(search="grid", trials=30, seed=4))
    assert result.holdout == predict_policy(holdout, result.best, seed=4)
    assert result.train == predict_policy(train, result.best, seed=4)
    folded = cross_validate_with(whole, AdaEDL, SearchSettings(search="grid", trials=16, seed=4), folds=5)
    assert folded.estimate.approximate == (mode == "rejection") == result.holdout.approximate
    assert folded.estimate.oracle_regret > 0
    assert folded.estimate.output_tokens == 102


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


def test_folds_hold_every_sequence_out_once() -> None:
    whole = PricedTrace(stretchy_trace(15, 80), RampCost())
    parts, settings = fold_sequences(whole.trace, 4), SearchSettings(trials=30, search="grid")
    assert sorted(np.concatenate(parts).tolist()) == list(range(15))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    result = cross_validate_with(whole, HuggingFace, settings, folds=4)
    assert [fold.sequences for fold in result.folds] == [len(part) for part in parts] and not result.interrupted
    seconds = 0.0
    for part, fold in zip(parts, result.folds, strict=True):
        assert fold.search_result == find_best(HuggingFace, whole.select(np.setdiff1d(np.arange(15), part)), settings)
        seconds += whole.select(part).replay(fold.search_result.best).seconds.sum()
    assert result.estimate.seconds == pytest.approx(seconds) and result.estimate.output_tokens == 15 * 80
    assert result.estimate.speedup.low < result.estimate.speedup.estimate < result.estimate.speedup.high
    assert result.references.keys() == {"runner_up", "default", "best_fixed_k"}
    json.dumps(result.as_dict(), allow_nan=False)
    with pytest.raises(InputError, match="folds=16"):
        fold_sequences(whole.trace, 16)


def test_an_interrupted_cross_validation_reports_the_folds_done() -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    whole = PricedTrace(stretchy_trace(8, 40), RampCost())
    result = cross_validate_with(whole, AdaEDL, SearchSettings(trials=20), folds=4, progress=stop)
    assert result.interrupted and 2 <= len(result.folds) < 4
    assert result.estimate.output_tokens == 40 * sum(fold.sequences for fold in result.folds)
