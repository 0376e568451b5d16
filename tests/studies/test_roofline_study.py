"""The study of rooflines, on profiles of hardware that is known: its tables say how far each roofline is off."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.roofline.cost import Overheads
from specsim.cost.roofline.hardware import Derating
from studies.roofline import run

CONFIG = tomllib.loads((Path(run.__file__).parent / "config.toml").read_text())
CONTEXTS = np.array(CONFIG["contexts"])
FACTS = {"eesd": {"layers": 2}, "medusa-1": {"heads": 4}}


def measured(target: str, drafter: str, rng: np.random.Generator) -> dict[str, Any]:
    """The profile of a machine whose operations start slowly, with 2 % of noise a cell."""
    document: dict[str, Any] = {"drafter_facts": FACTS.get(drafter, {})}
    cost = run.roofline(document, target, drafter, CONFIG)
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
    made = {"device": "a machine", "threads": 1, "dtype": "float32", "date": "2026-11-22T00:00:00"}
    return {**document, "contexts": CONTEXTS.tolist(), "mean_s": seconds, "provenance": made}


@pytest.fixture(scope="module")
def documents() -> dict[tuple[str, str], Any]:
    rng = np.random.default_rng(1)
    return {case: measured(*case, rng) for case in run.cases(CONFIG)}


def test_every_case_is_calibrated_on_half_of_its_cells_and_judged_by_the_others(documents: Any) -> None:
    for row in run.case_rows(documents, CONFIG):
        cells, before, after, largest = int(row[1]), *(float(row[column]) for column in (2, 3, 5))
        assert cells in (42, 43, 44) and after < 3 < 100 * run.GOAL < before and largest < 15, row


def test_depths_that_were_not_calibrated_are_predicted_too(documents: Any) -> None:
    rows = [*run.depth_rows(documents, CONFIG)]
    assert [row[0] for row in rows] == CONFIG["targets"][:-1]
    assert all(float(row[2]) < 5 for row in rows)


def test_the_report_is_written_from_profiles_that_are_there(tmp_path: Path, documents: Any) -> None:
    for case, document in documents.items():
        folder = tmp_path / run.case_name(*case)
        folder.mkdir()
        (folder / "profile.json").write_text(json.dumps(document))
    run.main(tmp_path, CONFIG)
    report = (tmp_path / "report.md").read_text()
    assert "met in 9 of 9 cases" in report and "| lab-deep:40, medusa-1 |" in report
    assert "| 16 | 420 | 416 (-1.0 %) | 424 (+1.0 %) |" in report
