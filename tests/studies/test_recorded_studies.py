"""Studies of experts, forecasts and measurement: rows by hand, and what they say of the recorded figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.experiment.forecast import BUSY_RUN_ERROR, IDLE_RUN_ERROR, OLD_RUN_ERROR, run_error
from specsim.io.json import from_keys
from studies.__main__ import HOME
from studies.experts import run
from studies.forecasts.run import TEXT_KNOWN, UNPROBED, fitted, speedups
from studies.measurement import runs
from tests.support import ROOT

MEASURED = json.loads((HOME / "experts" / "recorded" / run.MEASURED).read_text())
RECORDED = from_keys(MEASURED, run.Timings, "experts", "record again")
TIMING = run.Timing("mixtral-8x7b", "balanced", 1, token_s=0.010, draft_s=0.00375, verify_s={})


def test_the_least_acceptance_gives_as_many_tokens_as_a_round_costs() -> None:
    assert run.least_acceptance(1 + 0.5 + 0.25 + 0.125, 3) == pytest.approx(0.5)
    assert run.least_acceptance(4.0, 3) == pytest.approx(1.0)
    assert run.least_acceptance(0.9, 3) == 0.0
    assert run.least_acceptance(4.01, 3) is None


def test_rows_are_those_worked_out_by_hand() -> None:
    """1.5 to 3.7 tokens for verification; with drafting 1.875, which a chance of a half pays, to 4.075, which none."""
    row = run.row_of(replace(TIMING, verify_s={"once": 0.015, "separate": 0.037}), 3)
    assert row.model == "mixtral-8x7b, balanced"
    assert [row.verify_cost.low, row.verify_cost.high] == pytest.approx([1.5, 3.7])
    assert row.span == "0.50 to never"
    cheap = run.row_of(replace(TIMING, model="llama-2-7b", verify_s={"once": 0.006, "separate": 0.006}), 3)
    assert cheap.model == "llama-2-7b, dense" and cheap.span == "0.00"


def test_experts_cost_most_between_a_few_tokens_and_all_experts() -> None:
    """Of the recorded figures: three drafts cost 2.5 times a layer at batch 1, and nearly nothing more at 16."""
    seconds = {int(n): s for n, s in RECORDED.layer_s.items()}
    assert seconds[4] / seconds[1] == pytest.approx(2.5, abs=0.05)
    assert seconds[64] / seconds[16] < 1.05
    rows = [run.row_of(timing, 3) for timing in RECORDED.rows]
    at = {row.batch: row.verify_cost.low for row in rows if row.model == "qwen3-30b-a3b, balanced"}
    assert at[4] > at[2] > at[1] > 1.5 and at[16] < 1.1


def known(run: dict[str, Any], key: str) -> bool:
    return run["rows"][0][key] is not None


def test_the_fit_finds_what_errors_were_drawn_with() -> None:
    rng = np.random.default_rng(0)
    shares = rng.uniform(0, 0.8, 4000)
    errors = [rng.normal(0, 0.01 + 0.1 * share**2, 4) for share in shares]
    assert fitted(errors, shares.tolist()) == (pytest.approx(0.01, rel=0.05), pytest.approx(0.1, rel=0.05))


def test_forecasts_know_what_the_runs_showed() -> None:
    files = sorted((ROOT / "studies/forecasts/recorded").glob("run-*.json"))
    runs = [json.loads(file.read_text()) for file in files]
    errors = {
        key: [np.log(speedups(run["rows"], "measured") / speedups(run["rows"], key)) for run in runs if known(run, key)]
        for key in (TEXT_KNOWN, UNPROBED)
    }
    idle, busy = fitted(errors[TEXT_KNOWN], [run["load"]["others_percent"] / 100 for run in runs])
    assert (pytest.approx(idle, rel=0.1), pytest.approx(busy, rel=0.1)) == (IDLE_RUN_ERROR, BUSY_RUN_ERROR)
    old = np.sqrt(np.mean([np.mean(error**2) for error in errors[UNPROBED]]))
    assert pytest.approx(old, rel=0.1) == OLD_RUN_ERROR


@pytest.mark.parametrize("state", ["idle", "bursts, 2 x memory"])
def test_an_error_is_expected_as_large_as_it_was_in_the_least_and_the_most_loaded_state(state: str) -> None:
    files = sorted((ROOT / "studies/forecasts/recorded").glob("run-*.json"))
    runs = [run for run in (json.loads(file.read_text()) for file in files) if run["state"] == state]
    errors = [np.log(speedups(run["rows"], "measured") / speedups(run["rows"], TEXT_KNOWN)) for run in runs]
    measured = np.sqrt(np.mean([np.mean(error**2) for error in errors]))
    expected = np.sqrt(np.mean([run_error(run["load"]["others_percent"]) ** 2 for run in runs]))
    assert 0.5 < expected / measured < 2


def validation(speedups: dict[str, float]) -> dict[str, Any]:
    """A run of two sequences at these speedups."""
    rows = [
        {"label": label, "sequence_seconds": [1 / value, 2 / value], "sequence_tokens": [10, 20], "policy": "other"}
        for label, value in speedups.items()
    ]
    return {"noise_floor_percent": 0.5, "autoregressive_sequence_seconds": [1.0, 2.0], "rows": rows, "load": {}}


def test_what_two_runs_are_compared_by_is_collected_and_pooled(tmp_path: Path) -> None:
    run_speedups = [{"a": 1.0, "b": 2.0}, {"a": np.exp(0.02), "b": 2.0}, {"a": np.exp(0.04), "alone": 1.5}]
    for number, of_run in enumerate(run_speedups):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "validation.json").write_text(json.dumps(validation(of_run)))
    recorded_runs = runs.collected(tmp_path)
    labels = [[row["label"] for row in run["rows"]] for run in recorded_runs]
    assert labels == [["a", "b"], ["a", "b"], ["a", "alone"]]
    percent = 100 * np.sqrt((2**2 + 0 + 2**2) / 1e4 / 3)  # three degrees of freedom
    twice = {"first": recorded_runs, "second": recorded_runs}
    assert runs.spread_percent(twice) == pytest.approx(percent, rel=1e-9)
    (row,) = runs.run_rows({"first": recorded_runs})
    assert (row["set"], row["runs"], row["noise_floor_percent_high"]) == ("first", 3, 0.5)
    assert row["between_runs_percent"] == pytest.approx(percent)
