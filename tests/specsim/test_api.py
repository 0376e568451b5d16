"""The public API: what it promises in its docstrings, what it refuses, and that the documentation's block runs."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import specsim
from docs.pages import block
from specsim.learn.fit import fit
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import stretchy_trace

FUNCTIONS = [name for name in specsim.__all__ if inspect.isfunction(getattr(specsim, name))]


@pytest.mark.parametrize("name", specsim.__all__)
def test_the_examples_run(name: str) -> None:
    documented = getattr(specsim, name)
    tests = doctest.DocTestFinder(recurse=False).find(documented, name, globs={})
    assert tests and tests[0].examples
    runner = doctest.DocTestRunner(verbose=False)
    for test in tests:
        assert runner.run(test).failed == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_names_its_parameters_and_what_it_returns(name: str) -> None:
    function = getattr(specsim, name)
    doc = inspect.getdoc(function) or ""
    returns = inspect.signature(function).return_annotation not in ("None", None)
    for section in ("Parameters", "Examples", *(["Returns"] if returns else [])):
        assert f"{section}\n{'-' * len(section)}\n" in doc
    for parameter in inspect.signature(function).parameters:
        assert parameter in doc


def test_a_policy_deeper_than_the_trace_is_cut_to_it() -> None:
    trace = small_trace()
    assert trace.depth < 16
    prediction = specsim.predict(trace, RampCost(), "adaedl", gamma=0.2, lambda0=0.4)
    policy = specsim.make_policy("adaedl", {"gamma": 0.2, "lambda0": 0.4, "max_draft_tokens": trace.depth})
    assert prediction.policy == policy and prediction.learned_on == 0
    assert prediction.as_dict() == predict_policy(PricedTrace(trace, RampCost()), policy).as_dict()
    for part in (str(policy), str(prediction.speedup), "v_d", "r_d", "tau"):
        assert part in repr(prediction)


def test_a_policy_that_learns_is_reported_on_other_sequences() -> None:
    trace = stretchy_trace(12, 60)
    prediction = specsim.predict(trace, RampCost(), "renewal_stop")
    tuning, rest = split_sequences(trace)
    train, holdout = (PricedTrace(trace, RampCost()).select(part) for part in (tuning, rest))
    kind = specsim.policies()["renewal_stop"]
    learned = fit(kind, {"max_draft_tokens": trace.depth}, train.trace, train.table())
    assert prediction.as_dict() == predict_policy(holdout, learned).as_dict()
    assert (prediction.learned_on, prediction.sequences) == (len(tuning), len(rest))
    assert f"learned on {len(tuning)} sequences, reported on {len(rest)} others" in repr(prediction)


@pytest.mark.parametrize("name", ["renewal_stop", "time_gain"])
def test_a_policy_that_has_not_learned_is_not_replayed(name: str) -> None:
    with pytest.raises(specsim.InputError, match=f"{name} learns.*specsim.predict"):
        specsim.replay(small_trace(), RampCost(), name)


def test_an_unfitted_policy_object_is_refused_and_a_fitted_one_taken() -> None:
    trace, cost = small_trace(), RampCost()
    unfitted = specsim.make_policy("renewal_stop", {"max_draft_tokens": trace.depth})
    priceless = specsim.make_policy("time_gain", {"max_draft_tokens": trace.depth})
    for ask, policy in itertools.product((specsim.predict, specsim.replay), (unfitted, priceless)):
        with pytest.raises(specsim.InputError, match=policy.name):
            ask(trace, cost, policy)
    assert specsim.replay(trace, cost, priceless, cost_ratio=0.2).policy == dataclasses.replace(
        priceless, cost_ratio=0.2
    )
    fitted = fit(type(unfitted), {"max_draft_tokens": trace.depth}, trace, PricedTrace(trace, cost).table())
    assert specsim.predict(trace, cost, fitted).policy == fitted
    assert specsim.replay(trace, cost, fitted).num_rounds.sum() > 0


def test_a_replay_has_its_rounds_as_a_table() -> None:
    run = specsim.replay(small_trace(), RampCost(), "fixed_k", k=3)
    frame = run.rounds.to_frame()
    assert len(frame) == run.num_rounds.sum() and frame["accepted"].sum() == run.accepted.sum()
    assert frame["drafted"].max() == 3


def test_tuning_takes_fixed_settings_and_reports_on_the_other_part() -> None:
    trace = stretchy_trace(12, 60)
    tuned = specsim.tune(trace, RampCost(), "adaedl", search="grid", trials=20, gamma=0.3)
    assert tuned.best.settings["gamma"] == 0.3
    assert str(tuned.best) in repr(tuned) and all(warning in repr(tuned) for warning in tuned.warnings)
    assert tuned.holdout.output_tokens + tuned.train.output_tokens == len(trace.token)


def test_a_board_is_a_table_and_a_figure() -> None:
    board = specsim.leaderboard(stretchy_trace(12, 60), RampCost(), policies=["fixed_k", "p_min"], trials=6)
    frame = board.to_frame()
    assert frame["label"].tolist() == [row.label for row in board.rows]
    assert [line.split(": speedup ")[0] for line in repr(board).splitlines()] == frame["label"].tolist()
    assert (np.diff(frame["speedup"]) <= 0).all()
    labels = [text.get_text() for text in board.plot().axes[0].get_yticklabels()]
    assert labels == frame["label"].tolist()


def test_the_notebook_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specsim.write_trace(stretchy_trace(12, 40), tmp_path / "trace")
    (tmp_path / "profile.json").write_text(json.dumps({"s_d": 0.001, "s_t": 0.010}))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(block("howto/own_models.md", "specsim.read_trace"), names)  # the reader's notebook
    assert len(names["board"].to_frame()) > 5


def shown_results() -> list[type]:
    """The classes of what the public functions give."""
    return [
        importlib.import_module(f"specsim.{module}").__dict__[name]
        for module, name in (
            ("learn.predict", "Run"),
            ("learn.predict", "PolicyPrediction"),
            ("learn.tune", "TuneResult"),
            ("learn.tune", "CrossValidation"),
            ("compare.board", "Board"),
            ("trace.trace", "Trace"),
            ("replaying.rounds", "RoundLog"),
        )
    ]


def test_every_result_is_a_frame_and_what_it_shows_is_documented() -> None:
    for kind in shown_results():
        assert inspect.getdoc(kind.to_frame), kind
        if plot := getattr(kind, "plot", None):
            assert inspect.getdoc(plot), kind
    assert [hasattr(kind, "plot") for kind in shown_results()] == [True, False, True, True, True, False, False]


@pytest.mark.parametrize("name", ["learn.predict.Run", "learn.tune.TuneResult"])
def test_the_examples_of_figures_run(name: str) -> None:
    module, _, kind = name.rpartition(".")
    documented = getattr(importlib.import_module(f"specsim.{module}"), kind).plot
    (test,) = doctest.DocTestFinder(recurse=False).find(documented, name, globs={})
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_frames_hold_the_numbers_of_their_results() -> None:
    trace, cost = small_trace(), RampCost()
    run = specsim.replay(trace, cost, "fixed_k", k=3)
    table = run.to_frame()
    assert len(table) == trace.sequences and table["num_rounds"].sum() == run.num_rounds.sum()
    parts = table[["draft_s", "policy_s", "verify_s", "other_s"]].to_numpy()
    assert np.array_equal(parts, run.seconds)
    predicted = specsim.predict(trace, cost, "fixed_k", k=3)
    (row,) = predicted.to_frame().to_dict("records")
    assert (row["speedup"], row["speedup_high"]) == (predicted.speedup.estimate, predicted.speedup.high)
    assert (row["tau"], row["accepted"]) == (predicted.tau, predicted.accepted)
    tuned = specsim.tune(trace, cost, "fixed_k", trials=4)
    table = tuned.to_frame()
    assert table["speedup"]["tuned"] == tuned.holdout.speedup.estimate and np.isnan(table["tuned_gains"]["tuned"])
    gain = tuned.references["default"].comparison.difference.estimate
    assert table["tuned_gains"]["default settings"] == gain
    folded = specsim.cross_validate(trace, cost, "fixed_k", folds=2, trials=4)
    assert folded.to_frame()["speedup"]["tuned"] == folded.estimate.speedup.estimate
    positions = trace.to_frame()
    assert len(positions) == len(trace.token) and np.array_equal(positions["match_len"], trace.match_len)


def test_figures_show_their_numbers() -> None:
    trace, cost = small_trace(), RampCost()
    run = specsim.replay(trace, cost, "fixed_k", k=3)
    left, right = run.plot().axes
    shares = [bar.get_height() for bar in left.patches]
    assert sum(shares) == pytest.approx(100)
    assert shares[0] == pytest.approx(100 * float((run.rounds.accepted == 0).mean()))
    widths = [bar.get_width() for bar in right.patches]
    assert widths[-1] / sum(widths[:-1]) == pytest.approx(run.speedup)
    tuned = specsim.tune(trace, cost, "fixed_k", trials=4)
    (axes,) = tuned.plot().axes
    assert len(axes.get_yticks()) == 1 + len(tuned.references)
