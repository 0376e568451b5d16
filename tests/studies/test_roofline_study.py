"""The study of rooflines, on profiles of hardware that is known: how far each roofline is off."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.roofline.cost import Overheads
from specsim.cost.roofline.hardware import Derating
from studies.roofline import report, run
from tests.support.tiny import tiny_pair

CONFIG = tomllib.loads((Path(run.__file__).parent / "config.toml").read_text())
CONTEXTS = np.array(CONFIG["contexts"])
FACTS = {"eesd": {"layers": 2}, "medusa-1": {"heads": 4}}


def measured(target: str, drafter: str, rng: np.random.Generator) -> dict[str, Any]:
    """The profile of a machine whose operations start slowly, with 2 % of noise a cell."""
    document: dict[str, Any] = {"drafter_facts": FACTS.get(drafter, {})}
    cost = report.roofline(document, target, drafter, CONFIG)
    slow = Derating(0.5, 0.4, 3e-5, 0.2)
    passes = cost.draft_passes and replace(cost.draft_passes, derating=slow)
    beside = Overheads(round_s=1e-4, draft_step_s=0.0 if passes else 2e-6, cold_start_s=5e-4, cold_start_ratio=0.6)
    cost = replace(cost, target=replace(cost.target, derating=slow), draft_passes=passes, overheads=beside)

    def noisy(rows: Any) -> Any:
        seconds = np.array(rows)
        return (seconds * np.exp(0.02 * rng.standard_normal(seconds.shape))).tolist()

    seconds = {
        "draft_step": noisy([cost.draft_step(place, CONTEXTS) for place in range(CONFIG["depth"])]),
        "catch_up": cost.catch_up(CONTEXTS).tolist(),
        "verify": noisy([cost.verify(n, CONTEXTS) for n in range(1, CONFIG["depth"] + 2)]),
        "autoregressive": noisy(cost.autoregressive_step(CONTEXTS)),
        "policy_step": 0.0,
        "round_overhead": 1e-4,
    }
    provenance = {"device": "a machine", "threads": 1, "dtype": "float32", "date": "2026-11-22T00:00:00"}
    return {**document, "contexts": CONTEXTS.tolist(), "mean_s": seconds, "provenance": provenance}


def measured_in_batches(target: str, rng: np.random.Generator) -> dict[str, Any]:
    """The same machine's profile of batches."""
    cost = report.roofline({}, target, "model", CONFIG)
    slow = Derating(0.5, 0.4, 3e-5, 0.2)
    beside = Overheads(round_s=1e-4, cold_start_s=5e-4, cold_start_ratio=0.6)
    cost = replace(
        cost,
        target=replace(cost.target, derating=slow),
        draft_passes=replace(cost.draft_passes, derating=slow),
        overheads=beside,
    )
    asked = CONFIG["in_batches"]["probes"]
    sizes, each = range(1, asked["depth"] + 2), [replace(cost, batch=batch) for batch in asked["batches"]]

    def table(rows: Any) -> Any:
        seconds = np.swapaxes(rows, 1, 2)
        return (seconds * np.exp(0.02 * rng.standard_normal(seconds.shape))).tolist()

    return {
        "batches": asked["batches"], "contexts": CONTEXTS.tolist(), "tokens": [*sizes],
        "verify_s": table([[cost.verify(n, CONTEXTS) for n in sizes] for cost in each]),
        "draft_s": table([[cost.draft_step(place, CONTEXTS) for place in range(asked["depth"])] for cost in each]),
        "catch_up_s": np.zeros((len(each), len(CONTEXTS))).tolist(), "step_s": 1e-4, "round_s": 0.0,
        "noise_floor": 0.016,
    }  # fmt: skip


@pytest.fixture(scope="module")
def batched() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    return {target: measured_in_batches(target, rng) for target in CONFIG["in_batches"]["targets"]}


@pytest.fixture(scope="module")
def documents() -> dict[tuple[str, str], Any]:
    rng = np.random.default_rng(1)
    return {case: measured(*case, rng) for case in run.cases(CONFIG)}


def test_every_case_is_calibrated_on_half_of_its_cells_and_judged_by_the_others(documents: Any) -> None:
    for row in report.case_rows(documents, CONFIG):
        assert row["cells"] in (42, 43, 44) and row["median_percent"] < 3 < report.GOAL_PERCENT, row
        assert row["uncalibrated_percent"] > report.GOAL_PERCENT and row["largest_percent"] < 15, row


def test_depths_that_were_not_calibrated_are_predicted_too(documents: Any) -> None:
    rows = [*report.depth_rows(documents, CONFIG)]
    assert [row["target"] for row in rows] == CONFIG["targets"][:-1]
    assert all(row["median_percent"] < 5 for row in rows)


def test_one_calibration_serves_all_batches(batched: Any) -> None:
    for row in report.batch_rows(batched, CONFIG):
        assert row["cells"] == 4 * 4 * (5 + 4) / 2 and row["median_percent"] < 3, row
        assert row["uncalibrated_percent"] > report.GOAL_PERCENT and row["largest_percent"] < 15, row
        assert row["noise_floor_percent"] == pytest.approx(1.6)


def test_published_times_of_a_layer_of_experts_are_predicted() -> None:
    rows = {row["measured"]: row for row in report.expert_rows()}
    assert rows["16 tokens, 420 us"]["uncalibrated_percent"] == pytest.approx(11.0, abs=0.05)
    assert rows["16 tokens, 420 us"]["median_percent"] == pytest.approx(1.0, abs=0.05)


def test_batches_are_profiled_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(target: str, **settings: Any) -> Any:
        asked.append(target)
        return tiny_pair()

    monkeypatch.setattr(run, "load_pair", load)
    probes = {"batches": [1, 2], "contexts": [8, 24], "depth": 1, "repeats": 2}
    config = {**CONFIG, "in_batches": {"targets": ["lab"], "probes": probes}}
    document = run.profiled_in_batches("lab", config, lambda *_: None)
    assert asked == ["lab"] and document["noise_floor"] > 0
    assert (document["batches"], document["contexts"], document["tokens"]) == ([1, 2], [8, 24], [1, 2])
