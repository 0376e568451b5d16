"""The search finds what an exhaustive one finds, and says what it did."""

from __future__ import annotations

import dataclasses
import json
import signal

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost
from specsim.errors import InputError
from specsim.policy.base import setting
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK, initial_state, keep_drafting, update
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.chain.time_gain import TimeGain
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.speedup.prediction import predict_policy
from specsim.tuning import search
from specsim.tuning.crossval import cross_validate, fold_sequences
from specsim.tuning.search import find_best, tune
from specsim.tuning.settings import SearchSettings
from specsim.tuning.space import search_space
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import CASES, DEPTH, run_case, stretchy_trace


def speedup_of(policy: ChainPolicy) -> float:
    trace = small_trace()
    return replay(trace, policy, cost_table(trace, RampCost())).speedup


@pytest.mark.parametrize("kind", ["grid", "race", "optuna", None])
def test_a_countable_space_is_enumerated(kind: search.Search | None) -> None:
    trace = small_trace()
    found = tune(
        FixedK, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(trials=100, search=kind)
    )
    every = {k: speedup_of(FixedK(k=k)) for k in range(1, trace.depth + 1)}
    assert found.trials == trace.depth and found.search == "grid" and found.work == 1
    assert found.best == FixedK(k=max(every, key=lambda k: every[k]))
    assert found.train.speedup.estimate == pytest.approx(max(every.values()))
    assert found.runner_up == FixedK(k=sorted(every, key=lambda k: every[k])[-2])


@pytest.mark.parametrize("kind", ["grid", "race", "optuna"])
def test_tuned_settings_are_no_worse_than_the_defaults(kind: search.Search) -> None:
    trace = small_trace()
    found = tune(
        AdaEDL,
        PricedTrace(trace, RampCost()),
        PricedTrace(trace, RampCost()),
        SearchSettings(search=kind, trials=40, fixed={"dynamic": False}),
    )
    default = dataclasses.replace(AdaEDL(), dynamic=False, max_draft_tokens=trace.depth)
    assert found.trials <= 40 and found.search == kind
    table = cost_table(trace, RampCost())
    if kind == "optuna":  # its first trial; a coarse grid may miss them, a race drop them
        assert found.train.speedup.estimate >= replay(trace, default, table).speedup - 1e-12
    assert found.train.speedup.estimate == pytest.approx(replay(trace, found.best, table).speedup)
    assert found.references["default"].prediction.policy == default
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_default_is_optuna_for_few_trials_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace()
    assert (
        tune(AdaEDL, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(trials=3)).search
        == "optuna"
    )
    assert (
        tune(
            AdaEDL,
            PricedTrace(trace, RampCost()),
            PricedTrace(trace, RampCost()),
            SearchSettings(trials=search.OPTUNA_TRIALS + 1),
        ).search
        == "race"
    )
    race = tune(
        AdaEDL, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(search="race", trials=30)
    )
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    assert (
        tune(AdaEDL, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(trials=30)).best
        == race.best
    )


def test_bad_requests_are_refused() -> None:
    trace = small_trace()
    with pytest.raises(InputError, match="trials=0"):
        tune(FixedK, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(trials=0))
    with pytest.raises(InputError, match="jobs=0"):
        tune(FixedK, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(jobs=0))
    with pytest.raises(InputError, match="grid, race, optuna"):
        tune(FixedK, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(search="random"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'q'"):
        tune(FixedK, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), SearchSettings(fixed={"q": 1}))
    with pytest.raises(InputError, match="depth 6"):
        tune(
            AdaEDL,
            PricedTrace(trace, RampCost()),
            PricedTrace(trace, RampCost()),
            SearchSettings(fixed={"max_draft_tokens": 7}, trials=5),
        )
    with pytest.raises(InputError, match="folds=6"):
        fold_sequences(trace, 6)


@pytest.mark.parametrize("kind", CASES)
def test_the_answer_does_not_depend_on_threads(kind: search.Search) -> None:
    trace = stretchy_trace(30, 100)
    policy, trials = CASES[kind]
    one, three = (
        find_best(policy, PricedTrace(trace, RampCost()), SearchSettings(search=kind, trials=trials, seed=5, jobs=jobs))
        for jobs in (1, 3)
    )
    assert one == three


def profile_to(sizes: int) -> ProfileCost:
    """Verification measured up to so many tokens."""
    contexts = np.array([1, 512])
    verify_s = np.linspace(1e-2, 2e-2, sizes)[:, None] * np.ones(2)
    return ProfileCost(contexts, np.full((6, 2), 1e-3), np.zeros(2), verify_s, np.full(2, 1e-2), 1e-5, 1e-4)


def test_what_the_costs_cannot_price_is_passed_over() -> None:
    """SPACE verifies 1 + k(k + 2) tokens: 25 for k = 4, 36 for k = 5."""
    trace = small_trace()
    found = tune(
        SpaceK, PricedTrace(trace, profile_to(30)), PricedTrace(trace, profile_to(30)), SearchSettings(trials=20)
    )
    assert found.refused == 2 and found.trials == 6 and found.best.settings["k"] <= 4
    every = {k: replay(trace, p, cost_table(trace, profile_to(30), p)).speedup for k in range(1, 5) if (p := SpaceK(k))}
    assert found.best == SpaceK(max(every, key=lambda k: every[k]))
    assert found.train.speedup.estimate == pytest.approx(max(every.values()))
    # Without a table for each k, all k would cost as much, and the longest would win.
    with pytest.raises(InputError, match="asked for"):
        tune(
            SpaceK, PricedTrace(trace, profile_to(8)), PricedTrace(trace, profile_to(8)), SearchSettings(fixed={"k": 3})
        )


@dataclasses.dataclass(frozen=True)
class Choosy(ChainPolicy):
    """Every kind of setting; only one choice and one truth value draft far."""

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


@pytest.mark.parametrize("kind", ["grid", "race", "optuna"])
def test_choices_and_truth_values_are_searched(kind: search.Search) -> None:
    trace = stretchy_trace(12, 60)
    found = tune(
        Choosy,
        PricedTrace(trace, ConstantCost(1e-4, 1e-2)),
        PricedTrace(trace, ConstantCost(1e-4, 1e-2)),
        SearchSettings(search=kind, trials=120, fixed={"length": 1}),
    )
    assert found.best.max_draft_tokens >= 6  # nearly free drafts are long
    assert found.best.settings["how"] == "long" and found.best.settings["on"] is True


def test_a_fitted_default_is_where_the_search_starts() -> None:
    trace, cost = stretchy_trace(12, 60), ConstantCost(1e-3, 1e-2)
    found = tune(
        TimeGain, PricedTrace(trace, cost), PricedTrace(trace, cost), SearchSettings(search="optuna", trials=1)
    )
    assert found.best.settings["cost_ratio"] == pytest.approx(0.1)
    assert found.references["default"].prediction.policy == found.best and not any(
        "default" in warning for warning in found.warnings
    )


@pytest.mark.parametrize("mode", ["greedy", "rejection"])
def test_what_is_reported_is_the_prediction_of_the_best(mode: str) -> None:
    trace = small_trace(accept_prob=np.full((102, 6), 0.7, dtype=np.float32))
    trace = dataclasses.replace(trace, meta={**trace.meta, "decoding": {"mode": mode}})
    train, holdout = trace.select([0, 1, 3]), trace.select([2, 4])
    found = tune(
        AdaEDL,
        PricedTrace(train, RampCost()),
        PricedTrace(holdout, RampCost()),
        SearchSettings(search="race", trials=30, seed=4),
    )
    assert found.holdout == predict_policy(PricedTrace(holdout, RampCost()), found.best, seed=4)
    assert found.train == predict_policy(PricedTrace(train, RampCost()), found.best, seed=4)
    folded = cross_validate(
        AdaEDL, PricedTrace(trace, RampCost()), SearchSettings(search="grid", trials=16, seed=4), folds=5
    )
    assert folded.estimate.approximate == (mode == "rejection") == found.holdout.approximate
    assert folded.estimate.oracle_regret is not None and folded.estimate.oracle_regret > 0
    assert folded.estimate.output_tokens == 102


def test_data_that_separate_nothing_are_called_so() -> None:
    trace = small_trace()
    fixed = {"how": "short", "on": False, "length": 1}  # the other settings do nothing then
    found = tune(
        Choosy,
        PricedTrace(trace, RampCost()),
        PricedTrace(trace, RampCost()),
        SearchSettings(search="grid", trials=49, fixed=fixed),
    )
    assert found.runner_up is not None and found.references["runner_up"].comparison.difference.estimate == 0
    assert any("not significant on 5 sequences" in one and "the runner-up" in one for one in found.warnings)


def test_data_that_separate_give_no_warning() -> None:
    train, holdout = stretchy_trace(60, 400), stretchy_trace(60, 400, seed=1)
    found = tune(
        AdaEDL,
        PricedTrace(train, ConstantCost(2e-3, 1e-2)),
        PricedTrace(holdout, ConstantCost(2e-3, 1e-2)),
        SearchSettings(trials=50),
    )
    fixed_k = found.references["best_fixed_k"]
    assert fixed_k.comparison.significant and fixed_k.comparison.difference.low > 0
    assert not any("fixed K" in warning for warning in found.warnings)
    gain = found.holdout.speedup.estimate - fixed_k.prediction.speedup.estimate
    assert fixed_k.comparison.difference.estimate == pytest.approx(gain)


@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("kind", CASES)
def test_the_first_ctrl_c_gives_the_best_so_far_and_the_second_aborts(kind: search.Search) -> None:
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)

    found = run_case(kind, 0, progress=stop)
    assert found.interrupted and calls == 2 and found.best.settings["max_draft_tokens"] == DEPTH

    def stop_at_once(done: int, total: int) -> None:
        raise AssertionError("nothing was found yet")

    trace = stretchy_trace(10, 40)

    class Stubborn(AdaEDL):
        @property
        def carries_state(self) -> bool:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # nothing to report
        tune(Stubborn, PricedTrace(trace, RampCost()), PricedTrace(trace, RampCost()), progress=stop_at_once)


def test_folds_hold_every_sequence_out_once() -> None:
    trace = stretchy_trace(15, 80)
    parts = fold_sequences(trace, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(15))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    result = cross_validate(
        HuggingFace, PricedTrace(trace, RampCost()), SearchSettings(trials=30, search="grid"), folds=4
    )
    assert [fold.sequences for fold in result.folds] == [len(part) for part in parts] and not result.interrupted
    speculative = 0.0
    for part, fold in zip(parts, result.folds, strict=True):
        train = trace.select(np.setdiff1d(np.arange(15), part))
        assert fold.found == find_best(
            HuggingFace, PricedTrace(train, RampCost()), SearchSettings(trials=30, search="grid")
        )
        held = trace.select(part)
        speculative += replay(held, fold.found.best, cost_table(held, RampCost())).seconds.sum()
    assert result.estimate.seconds == pytest.approx(speculative)
    assert result.estimate.output_tokens == 15 * 80
    assert result.estimate.speedup.low < result.estimate.speedup.estimate < result.estimate.speedup.high
    assert result.references.keys() == {"runner_up", "default", "best_fixed_k"}
    json.dumps(result.as_dict(), allow_nan=False)


def test_an_interrupted_cross_validation_reports_the_folds_done() -> None:
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    result = cross_validate(
        AdaEDL, PricedTrace(stretchy_trace(8, 40), RampCost()), SearchSettings(trials=20), folds=4, progress=stop
    )
    assert result.interrupted and 2 <= len(result.folds) < 4
    assert result.estimate.output_tokens == 40 * sum(fold.sequences for fold in result.folds)
