"""Published measurements: the package ships what they say, and the aims are met on systems that no fit has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specsim.cost.roofline import document, published

pytest.importorskip("torch")
from studies.published import cases, run
from studies.published.fit import MICROSECOND, Cells, Parameters, fitted, prompt_shares, robust


@pytest.fixture(scope="module")
def study() -> run.Study:
    return run.Study.of_data()


def test_the_package_ships_what_the_published_runs_say(study: run.Study) -> None:
    preset = json.loads(document.PRESET.read_text())
    assert {name: preset[name] for name in study.preset._fields} == study.preset._asdict()
    assert f"{len(study.plain) + len(study.runs):,} published runs" in preset["source"]
    assert json.loads(published.ERRORS.read_text()) == json.loads(json.dumps(study.errors_document))


def test_systems_that_no_fit_has_seen_are_predicted_within_the_aims(study: run.Study) -> None:
    rows = {name: run.errors_row(predictions) for name, predictions in study.rows()}
    assert rows[run.STEP_DENSE][run.HELD_OUT] < 8 and rows[run.SERVED_DENSE][run.HELD_OUT] < 12  # percent
    assert rows[run.CHAINS][run.HELD_OUT] < 9 and rows[run.PACKED_SPEEDUPS][run.HELD_OUT] < 12
    losses = np.concatenate([study.losses(experts=experts) for experts in (False, True)])
    assert len(losses) == 35 and (losses <= 0.01).sum() >= 28 and losses.mean() < 0.01
    assert all(
        0.85 <= np.mean([*shares.values()]) <= 0.95 for shares in study.coverage.values()
    )  # bands are 90 % intervals
    two = {run.SERVED_DENSE: 5, run.SERVED_EXPERTS: 5, run.CHAINS_DENSE: 3}  # calibrated on two runs
    assert all(rows[name][run.TWO_RUNS] < most for name, most in two.items())


def test_every_system_counts_the_same() -> None:
    values, systems = np.array([1.0, 2.0, 3.0, 9.0]), ["a", "a", "a", "b"]
    assert [run.quantile(values, systems, share) for share in (0.4, 0.5, 0.51, 0.9)] == [3.0, 3.0, 9.0, 9.0]
    single = robust(np.array([0.3, -0.3]), ["a", "b"])
    assert single[0] == -single[1] > 0
    many = robust(np.full(4, 0.3), ["a"] * 4)
    assert (many**2).sum() == pytest.approx(single[0] ** 2)
    assert robust(np.array([1e-3]), ["a"])[0] == pytest.approx(1e-3, rel=1e-3)  # small errors count as they are


def test_speedups_of_a_source_are_predicted_by_the_other_sources(study: run.Study) -> None:
    rounds = study.rounds
    sources = {run.about["source"] for run in study.runs}
    assert {system.partition(", ")[2] for system in rounds.systems} == sources
    here = np.array([run.about["source"] == "SpecBundle" for run in study.runs])
    alone = rounds.speedups(rounds.fitted(~here))[here]
    assert rounds.held_out(rounds.systems, run.each)[here] == pytest.approx(alone)


def test_parameters_that_generated_times_are_recovered() -> None:
    truth = Parameters(0.7, 4.0, 12.0, 30.0)
    some = [case for case in cases.steps() if case.about["dtype"] == "bf16"]
    some = [replace(case, sequences=8 * (1 + n % 4)) for n, case in enumerate(some)]
    seconds = Cells.of(some).seconds(truth)
    made = [replace(case, measured_s=s) for case, s in zip(some, seconds.tolist(), strict=True)]
    found = fitted(made)
    assert {**vars(found), "prompt_shares": 0} == pytest.approx({**vars(truth), "prompt_shares": 0}, rel=1e-3)
    assert truth.derating.launch_s == pytest.approx(4 * MICROSECOND)


def test_prompt_shares_and_overheads_that_generated_times_are_recovered(study: run.Study) -> None:
    truth = replace(study.parameters, prompt_shares=(0.25, 0.6))
    cells = Cells.of(study.plain)
    engines = [case.about["engine"] for case in study.plain]
    assert prompt_shares(cells, cells.seconds(truth), engines, study.parameters) == pytest.approx((0.25, 0.6))
    rounds = study.rounds
    truths = {name: np.full(4, 1e-3 if cases.AT_EARLY in name else 0.4e-3) for name in study.overheads_s}
    for overheads in truths.values():
        overheads[run.PER_SEQUENCE] = 0.2e-3  # shared by both eras
    again = replace(rounds, measured=rounds.speedups(truths)).fitted(rounds.everything)
    for name in ("sglang", "vllm", "sglang@2025-03", "vllm@2025-03"):
        assert again[name][:3] == pytest.approx(truths[name][:3], rel=0.1)


def test_the_spread_between_systems_is_recovered() -> None:
    rng = np.random.default_rng(0)
    shifts = 0.2 * rng.standard_normal(400)
    runs = [
        published.Runs("speedup", f"{n}", (f"word {n % 2}",), 1000, float(shift), 0.05)
        for n, shift in enumerate(shifts)
    ]
    spread = run.fitted_spread(runs)
    assert (spread.system, spread.run) == pytest.approx((0.2, 0.05), rel=0.1) and spread.word < 0.1


def test_a_system_is_predicted_by_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [case for case in cases.steps() if case.about["engine"] in ("gpt-fast", "vllm")]
    fits: list[set[str]] = []

    def spy(seen: Any) -> Parameters:
        fits.append({case.system for case in seen})
        return fitted(seen)

    monkeypatch.setattr(run, "fitted", spy)
    everyone = {case.system for case in some}
    run.held_out(some, run.each)
    assert sorted(everyone - seen for seen in fits) == [{system} for system in sorted(everyone)]
    one, other = run.halves(everyone)
    assert not one & other and one | other == everyone and abs(len(one) - len(other)) <= 1
