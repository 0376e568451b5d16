"""Published measurements: the package ships what they say, and the aims are met on systems that no fit has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specsim.cost.roofline import engine, published

pytest.importorskip("torch")
from studies.published import cases, errors, report
from studies.published.fit import MICROSECOND, Cells, Parameters, fitted


@pytest.fixture(scope="module")
def study() -> report.Study:
    return report.Study.of_data()


def median_percent(study: report.Study, name: str) -> float:
    (predictions,) = (own for row, own in study.rows() if row == name)
    return float(np.median([abs(p.error(report.HELD_OUT)) for p in predictions]))


def test_the_package_ships_what_the_published_runs_say(study: report.Study) -> None:
    preset = json.loads(engine.PRESET.read_text())
    assert {name: preset[name] for name in study.preset} == study.preset
    assert f"{len(study.plain) + len(study.runs):,} published runs" in preset["source"]
    assert json.loads(published.ERRORS.read_text())["classes"] == study.classes


def test_systems_that_no_fit_has_seen_are_predicted_within_the_aims(study: report.Study) -> None:
    aims = {report.STEP_DENSE: 8, report.SERVED_DENSE: 12, report.CHAINS_DENSE: 8}  # percent, medians
    assert all(median_percent(study, name) < most for name, most in aims.items())
    several, right = study.fastest_parallelism()
    assert right > 0.9 * several > 0.9 * 200


def test_what_made_the_times_is_found_again() -> None:
    truth = Parameters(0.7, 4.0, 12.0, 30.0)
    some = [case for case in cases.steps() if case.about["dtype"] == "bf16"]
    some = [replace(case, sequences=8 * (1 + n % 4)) for n, case in enumerate(some)]
    seconds = Cells.of(some).seconds(truth)
    made = [replace(case, measured_s=s) for case, s in zip(some, seconds.tolist(), strict=True)]
    assert vars(fitted(made)) == pytest.approx(vars(truth), rel=1e-3)
    assert truth.derating.launch_s == pytest.approx(4 * MICROSECOND)


def test_a_system_is_predicted_by_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [case for case in cases.steps() if case.about["engine"] in ("gpt-fast", "vllm")]
    fits: list[set[str]] = []

    def spy(seen: Any) -> Parameters:
        fits.append({case.system for case in seen})
        return fitted(seen)

    monkeypatch.setattr(errors, "fitted", spy)
    everyone = {case.system for case in some}
    errors.held_out(some, errors.each)
    assert sorted(everyone - seen for seen in fits) == [{system} for system in sorted(everyone)]
    one, other = errors.halves(everyone)
    assert not one & other and one | other == everyone and abs(len(one) - len(other)) <= 1
