"""The public API: what docstrings promise, what is taken, refused and shown; and the documentation's block runs."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import itertools
import json
import re
from functools import cache
from html import escape
from pathlib import Path

import numpy as np
import pytest

import specsim
from docs.pages import block
from specsim.cost.files import shipped_costs
from specsim.io.examples import example_files
from specsim.learn.fit import fit
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import stretchy_trace

TRACE, COST = "example:lab-model", "example:lab-deep-model"


@pytest.mark.parametrize("name", specsim.__all__)
def test_the_examples_run(name: str) -> None:
    documented = getattr(specsim, name)
    tests = doctest.DocTestFinder(recurse=False).find(documented, name, globs={})
    assert tests and tests[0].examples
    runner = doctest.DocTestRunner(verbose=False)
    for test in tests:
        assert runner.run(test).failed == 0


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
            ("compare.leaderboard", "Board"),
            ("trace.trace", "Trace"),
            ("replaying.rounds", "RoundLog"),
        )
    ]


def test_every_result_is_a_frame_and_what_it_shows_is_documented() -> None:
    for kind in shown_results():
        assert inspect.getdoc(kind.to_frame), kind
        if plot := getattr(kind, "plot", None):
            assert inspect.getdoc(plot), kind
    assert [hasattr(kind, "plot") for kind in shown_results()] == [True, False, True, True, False, False]


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


@pytest.mark.parametrize("name", example_files("trace"))
def test_a_trace_says_what_it_is_in_one_line(name: str) -> None:
    trace = specsim.read_trace(name)
    text = repr(trace)
    assert "\n" not in text and len(text) < 160
    tokens = int(trace.output_tokens.sum())
    of = ("target smollm2", "greedy") if "smollm2" in name else ("target lab", " at temperature ")
    for part in (f"{trace.sequences} sequences", f"{tokens:,} tokens", "depth 8", *of, "drafter "):
        assert part in text
    assert repr(trace.select([0, 1])).startswith("Trace: 2 sequences")


def test_a_joined_trace_names_all_its_drafters() -> None:
    names = "example:lab-lookup", "example:lab-eagle"
    joined = specsim.join_traces({name: specsim.read_trace(name) for name in names})
    assert repr(joined).startswith("JoinedTrace: 24 sequences") and "prompt-lookup + lab/eagle" in repr(joined)


@pytest.mark.parametrize("name", [*example_files("cost"), *shipped_costs()])
def test_costs_say_what_steps_take_in_one_line(name: str) -> None:
    cost = specsim.read_cost(name)
    text = repr(cost)
    assert "\n" not in text and len(text) < 160
    if "cached tokens" in text:  # else a constant, whose two numbers are all of it
        shown = re.search(
            r"decoding step ([\d.]+) ms,( proposal ([\d.]+) ms,)? draft step ([\d.]+) ms at ([\d,]+) cached", text
        )
        context = int(shown[5].replace(",", ""))
        assert float(shown[1]) == pytest.approx(1e3 * float(cost.autoregressive_step(context)), rel=1e-3)
        draft_ms = float(shown[3] or 0.0) + float(shown[4])
        assert draft_ms == pytest.approx(1e3 * float(cost.draft(1, context)), rel=1e-3)


def test_joined_costs_stay_short() -> None:
    lookup, eagle = specsim.ConstantCost(1e-6, 0.010), specsim.read_cost("example:lab-deep-eagle")
    assert len(repr(specsim.JoinedCost((lookup, eagle)))) < 200


def test_a_cost_model_that_is_being_written_can_be_shown() -> None:
    from specsim.cost.model import CostModel

    class Mine(CostModel):
        """Answers nothing yet."""

    assert "Mine" in repr(Mine())


@cache
def results() -> dict[str, object]:
    run = specsim.replay(TRACE, COST, "fixed_k", k=3)
    return {
        "prediction": specsim.predict(TRACE, COST, "fixed_k", k=3),
        "run": run,
        "rounds": run.rounds,
        "tuned": specsim.tune(TRACE, COST, "fixed_k", trials=4),
        "board": specsim.leaderboard(TRACE, COST, policies="fixed_k", trials=4),
        "row": specsim.leaderboard(TRACE, COST, policies="fixed_k", trials=4).rows[0],
        "tree": specsim.read_trace("example:lab-eagle").tree,
    }


@pytest.mark.parametrize("name", [
    "prediction", "run", "rounds", "tuned", "board", "row", "tree"])  # fmt: skip
def test_results_are_short(name: str) -> None:
    text = repr(results()[name])
    assert len(text) < 400 and "array(" not in text


@pytest.mark.parametrize("name", ["prediction", "tuned", "board"])
def test_a_notebook_shows_the_table_and_every_remark(name: str) -> None:
    result = results()[name]
    page = result._repr_html_()
    assert page.count("<tr") == 1 + len(result.to_frame())
    for remark in (*getattr(result, "notes", ()), *getattr(result, "warnings", ())):
        assert escape(remark) in page
    assert json.loads(json.dumps(result.to_dict())) == json.loads(json.dumps(result.as_dict()))


def test_what_a_file_says_is_no_markup() -> None:
    prediction = results()["prediction"]
    object.__setattr__(prediction, "cost_notes", ("<script>alert(1)</script>",))
    try:
        assert "<script>" not in prediction._repr_html_()
    finally:
        object.__setattr__(prediction, "cost_notes", ())


CONSTANT = {"s_d": 0.001, "s_t": 0.010}
FEW = {"trials": 4, "seed": 1}

MINE = """
import dataclasses, numba, specsim

@numba.njit
def initial_state(params):
    return (0.0,)

@numba.njit
def keep_drafting(state, params, step, depth, u):
    return step.confidence > params.floor, state

@numba.njit
def update(state, params, drafted, accepted):
    return state

@dataclasses.dataclass(frozen=True)
class Floor(specsim.ChainPolicy):
    floor: float = specsim.setting(0.3, 0.0, 1.0, tune=(0.05, 0.95))
    max_draft_tokens: int = specsim.setting(8, 1, 255, bounds="depth")
    name = "my_floor"
    source = "these tests"
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    specsim.write_trace(specsim.read_trace(TRACE), folder / "trace")
    (folder / "cost.json").write_text(json.dumps(CONSTANT))
    (folder / "mine.py").write_text(MINE)
    return folder


def own_class() -> type[specsim.ChainPolicy]:
    """A class as a cell of a notebook defines it: of no module's, in no file."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(MINE, "<cell 1>", "exec"), names)
    return names["Floor"]


def test_traces_and_costs_by_name_path_text_and_object_are_the_same(folder: Path) -> None:
    trace, cost = specsim.read_trace(TRACE), specsim.read_cost(folder / "cost.json")
    wanted = specsim.predict(trace, cost, "fixed_k", k=3).as_dict()
    for a_trace in (TRACE, folder / "trace", str(folder / "trace")):
        for a_cost in (folder / "cost.json", str(folder / "cost.json"), CONSTANT):
            assert specsim.predict(a_trace, a_cost, "fixed_k", k=3).as_dict() == wanted
    assert specsim.replay(folder / "trace", CONSTANT, "fixed_k", k=3).rounds is not None
    assert specsim.tune(folder / "trace", CONSTANT, "fixed_k", **FEW).best.name == "fixed_k"
    assert specsim.leaderboard(TRACE, CONSTANT, policies=["fixed_k"], **FEW).rows
    joined = specsim.join_traces({"lookup": "example:lab-lookup", "eagle": folder.parent / folder.name / "trace"})
    assert [part.meta["drafter"] for part in joined.parts] == ["prompt-lookup", trace.meta["drafter"]]


def test_a_trace_is_written_from_where_it_is(folder: Path, tmp_path: Path) -> None:
    specsim.write_trace(folder / "trace", tmp_path / "copy")
    assert np.array_equal(specsim.read_trace(tmp_path / "copy").token, specsim.read_trace(TRACE).token)


def test_a_mapping_is_read_as_its_file_would_be() -> None:
    for name in ("vllm-llama3.1-8b-eagle-h100", "adaedl-llama2-7b-115m"):
        from specsim.cost.files import shipped_costs

        document = json.loads(shipped_costs()[name].read_text())
        assert specsim.read_cost(document) == specsim.read_cost(name)
    assert specsim.read_cost({"s_d": np.float32(0.5), "s_t": np.int64(1)}) == specsim.ConstantCost(0.5, 1.0)
    assert specsim.read_cost({"s_d": 0.05, "s_t": 1}).s_t == 1
    for wrong, why in (({"s_d": 0.05}, "neither a profile nor"), ({"s_d": "x", "s_t": 1}, "Expected `float`"),
                       ({"s_d": float("nan"), "s_t": 1}, "finite"), ({"s_d": -1.0, "s_t": 1}, "positive")):  # fmt: skip
        with pytest.raises(specsim.InputError, match=why):
            specsim.read_cost(wrong)


def test_one_name_is_one_policy(folder: Path) -> None:
    board = specsim.leaderboard(TRACE, COST, policies="fixed_k", **FEW)
    several = specsim.leaderboard(TRACE, COST, policies=["fixed_k"], **FEW)
    assert board.to_frame().equals(several.to_frame()) and {row.policy.name for row in board.rows} == {"fixed_k"}
    by_name, listed = specsim.policies(str(folder / "mine.py")), specsim.policies([folder / "mine.py"])
    assert by_name == listed and "my_floor" in by_name and "fixed_k" in by_name


def test_a_class_is_a_policy_everywhere() -> None:
    wanted = specsim.predict(TRACE, COST, "fixed_k", k=3)
    assert specsim.predict(TRACE, COST, FixedK, k=3) == wanted
    assert specsim.replay(TRACE, COST, FixedK, k=3).speedup == wanted.speedup
    assert specsim.tune(TRACE, COST, FixedK, **FEW) == specsim.tune(TRACE, COST, "fixed_k", **FEW)
    assert specsim.make_policy(FixedK, k=3) == wanted.policy
    learned = specsim.predict(TRACE, COST, specsim.policies()["time_gain"])
    assert learned == specsim.predict(TRACE, COST, "time_gain") and learned.learned_on > 0


def test_a_class_of_a_notebook_is_a_policy_everywhere(folder: Path) -> None:
    mine, filed = own_class(), f"{folder / 'mine.py'}:my_floor"
    assert specsim.predict(TRACE, COST, mine, floor=0.4).v_d == specsim.predict(TRACE, COST, filed, floor=0.4).v_d
    best = specsim.tune(TRACE, COST, mine, **FEW).best
    assert type(best) is mine and best.settings == specsim.tune(TRACE, COST, filed, **FEW).best.settings
    board = specsim.leaderboard(TRACE, COST, policies=["fixed_k", mine], **FEW)
    assert {row.policy.name for row in board.rows} == {"fixed_k", "my_floor"}
    assert specsim.make_policy(mine, floor=0.4).settings["floor"] == 0.4
    assert "my_floor" in specsim.policies(mine)


def test_a_class_that_cannot_serve_is_refused_in_words() -> None:
    class NoFunctions(specsim.ChainPolicy):
        """Has neither a name nor functions."""

    with pytest.raises(specsim.InputError, match="NoFunctions has no 'name'"):
        specsim.predict(TRACE, COST, NoFunctions)
    usurper = own_class()
    usurper.name = "fixed_k"
    with pytest.raises(specsim.InputError, match="has the name of a built-in policy"):
        specsim.leaderboard(TRACE, COST, policies=usurper)


def test_settings_are_keywords() -> None:
    assert specsim.make_policy("fixed_k", k=3).k == 3
    assert specsim.make_policy("fixed_k", {"k": 3}) == specsim.make_policy("fixed_k", k="3")
    policy = specsim.make_policy("adaedl", gamma=0.2)
    changed = specsim.make_policy(policy, lambda0=0.4)
    assert changed.settings == {**policy.settings, "lambda0": 0.4}
    asked = specsim.predict(TRACE, COST, specsim.make_policy("fixed_k"), k=2)
    assert asked.policy == specsim.make_policy("fixed_k", k=2)
    for call in (lambda: specsim.make_policy("fixed_k", width=3), lambda: specsim.make_policy(policy, width=3)):
        with pytest.raises(specsim.InputError, match="no setting 'width'"):
            call()


WRONG = {
    "a list for one policy": (lambda: specsim.tune(TRACE, COST, ["fixed_k"]), "policy is a list; expected a name"),
    "no policy": (lambda: specsim.predict(TRACE, COST, None), "policy is a NoneType; expected"),
    "a number": (lambda: specsim.leaderboard(TRACE, COST, policies=3), "policy is a int; expected"),
    "a class of something else": (lambda: specsim.predict(TRACE, COST, dict), "policy is a type; expected"),
    "settings that are chosen": (
        lambda: specsim.tune(TRACE, COST, specsim.make_policy("fixed_k", k=3)),
        "policy is fixed_k(k=3), whose settings are already chosen; give its name 'fixed_k' or class",
    ),
    "the same on a board": (
        lambda: specsim.leaderboard(TRACE, COST, policies=[specsim.make_policy("fixed_k")]),
        "already chosen",
    ),
    "an array for a trace": (
        lambda: specsim.predict(np.zeros(3), COST, "fixed_k"),
        "trace is a ndarray; expected a Trace, its folder",
    ),
    "a trace for costs": (
        lambda: specsim.predict(TRACE, specsim.read_trace(TRACE), "fixed_k"),
        "cost is a Trace; expected a cost model",
    ),
    "a number for costs": (lambda: specsim.tune(TRACE, 0.1, "fixed_k"), "cost is a float; expected"),
    "no costs": (lambda: specsim.read_cost(None), "cost is a NoneType; expected"),
    "no trace": (lambda: specsim.leaderboard(None, COST), "trace is a NoneType; expected"),
    "nothing to write": (lambda: specsim.write_trace({}, "x"), "trace is a dict; expected"),
    "nothing to read": (lambda: specsim.read_trace(3), "trace is a int; expected"),
    "numbers to join": (lambda: specsim.join_traces({"a": 1, "b": 2}), "trace is a int; expected"),
    "one trace to join": (lambda: specsim.join_traces(TRACE), "traces is a str; expected a mapping"),
    "parts that are no costs": (lambda: specsim.JoinedCost((1, 2)), "cost is a int; expected"),
}


@pytest.mark.parametrize("case", WRONG)
def test_anything_else_is_refused_in_words(case: str) -> None:
    call, why = WRONG[case]
    with pytest.raises(TypeError, match=re.escape(why)) as error:
        call()
    assert "\n" not in str(error.value)
