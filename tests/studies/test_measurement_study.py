"""What the study of measurement says of whole runs of a commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.measurement import runs


def validation(speedups: dict[str, float]) -> dict[str, Any]:
    """A run of two sequences at these speedups."""
    rows = [
        {"label": label, "sequence_seconds": [1 / value, 2 / value], "sequence_tokens": [10, 20], "policy": "other"}
        for label, value in speedups.items()
    ]
    return {"noise_floor_percent": 0.5, "autoregressive_sequence_seconds": [1.0, 2.0], "rows": rows, "load": {}}


def test_what_two_runs_are_compared_by_is_collected_and_pooled(tmp_path: Path) -> None:
    run_speedups = [{"a": 1.0, "b": 2.0}, {"a": np.exp(0.02), "b": 2.0}, {"a": np.exp(0.04), "alone": 1.5}]
    for number, speedups in enumerate(run_speedups):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "validation.json").write_text(json.dumps(validation(speedups)))
    recorded_runs = runs.collected(tmp_path)
    assert [[row["label"] for row in run["rows"]] for run in recorded_runs] == [["a", "b"], ["a", "b"], ["a", "alone"]]
    assert recorded_runs[0].keys() == {"noise_floor_percent", "autoregressive_sequence_seconds", "rows"}
    percent, freedom = runs.spread_percent(recorded_runs)
    assert freedom == 3 and percent == pytest.approx(100 * np.sqrt((2**2 + 0 + 2**2) / 1e4 / 3), rel=1e-9)
    assert runs.pooled_percent({"first": recorded_runs, "second": recorded_runs}) == pytest.approx(percent, rel=1e-12)
    (row,) = runs.run_rows({"first": recorded_runs})
    assert (row["set"], row["runs"]) == ("first", 3) and row["noise_floor_percent_high"] == 0.5
    assert row["between_runs_percent"] == pytest.approx(percent)
