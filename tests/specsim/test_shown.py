"""What a notebook or a prompt shows of traces, costs and results: a few lines, whatever they hold."""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape

import pytest

import specsim
from specsim.cost.files import shipped_costs
from specsim.io.examples import example_files

TRACE, COST = "example:lab-model", "example:lab-deep-model"


@pytest.mark.parametrize("name", example_files("trace"))
def test_a_trace_says_what_it_is_in_one_line(name: str) -> None:
    trace = specsim.read_trace(name)
    text = repr(trace)
    assert "\n" not in text and len(text) < 160
    tokens = int(trace.output_tokens.sum())
    of = ("target smollm2", "greedy") if "smollm2" in name else ("target lab", "gumbel")
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
        "cross_validated": specsim.cross_validate(TRACE, COST, "fixed_k", folds=2, trials=4),
        "board": specsim.leaderboard(TRACE, COST, policies="fixed_k", trials=4),
        "row": specsim.leaderboard(TRACE, COST, policies="fixed_k", trials=4).rows[0],
        "tree": specsim.read_trace("example:lab-eagle").tree,
    }


@pytest.mark.parametrize("name", [
    "prediction", "run", "rounds", "tuned", "cross_validated", "board", "row", "tree"])  # fmt: skip
def test_results_are_short(name: str) -> None:
    text = repr(results()[name])
    assert len(text) < 400 and "array(" not in text


@pytest.mark.parametrize("name", ["prediction", "tuned", "cross_validated", "board"])
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
