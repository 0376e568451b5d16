"""Sealed forecasts: what the study fits on its runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from realrun.experiment.forecast import BUSY_RUN_ERROR, IDLE_RUN_ERROR, OLD_RUN_ERROR, run_error
from studies.forecasts.report import TEXT_KNOWN, UNPROBED, fitted, speedups
from tests.support import ROOT


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
    expected = np.sqrt(np.mean([run_error(run) ** 2 for run in runs]))
    assert 0.5 < expected / measured < 2
