"""The search finds what an exhaustive one finds, and says what it did."""

from __future__ import annotations

import dataclasses

import pytest
from reference import RampCost, small_trace

from specsim.errors import InputError
from specsim.policy import AdaEDL, FixedK
from specsim.replay import compile_for, replay
from specsim.tuning import search, tune


def speedup_of(policy: FixedK) -> float:
    trace = small_trace()
    return replay(trace, policy, compile_for(trace, RampCost())).speedup


def test_a_countable_space_is_enumerated() -> None:
    trace = small_trace()
    found = tune(FixedK, trace, trace, RampCost(), trials=100)
    every = {k: speedup_of(FixedK(k=k)) for k in range(1, trace.depth + 1)}
    assert found.trials == trace.depth
    assert found.best == FixedK(k=max(every, key=lambda k: every[k]))
    assert found.train.speedup.estimate == pytest.approx(max(every.values()))


@pytest.mark.parametrize("kind", ["grid", "optuna"])
def test_tuned_settings_are_no_worse_than_the_defaults(kind: search.Search) -> None:
    trace = small_trace()
    found = tune(AdaEDL, trace, trace, RampCost(), search=kind, trials=40, fixed={"dynamic": False})
    default = dataclasses.replace(AdaEDL(), dynamic=False, max_draft=trace.depth)
    assert found.trials <= 40
    table = compile_for(trace, RampCost())
    if kind == "optuna":  # its first trial; a coarse grid may miss them
        assert found.train.speedup.estimate >= replay(trace, default, table).speedup - 1e-12
    assert found.train.speedup.estimate == pytest.approx(replay(trace, found.best, table).speedup)


def test_without_optuna_the_default_is_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace()
    grid = tune(AdaEDL, trace, trace, RampCost(), search="grid", trials=30)
    monkeypatch.setattr(search, "find_spec", lambda name: None)
    assert tune(AdaEDL, trace, trace, RampCost(), trials=30).best == grid.best


def test_no_trials_are_refused() -> None:
    with pytest.raises(InputError, match="trials=0"):
        tune(FixedK, small_trace(), small_trace(), RampCost(), trials=0)
