"""Spread of runs of the same commit: `python -m studies.measurement.runs FOLDER...` collects the validations there.

Every folder holds a set: validations of the same commit on the same prompts, each in a folder of its own. Writes
runs.json, which run.py reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specsim.io.files import write_json

RUNS = "runs.json"
OF_RUN = ("noise_floor_percent", "autoregressive_sequence_seconds")
OF_ROW = ("label", "sequence_seconds", "sequence_tokens")
Run = Mapping[str, Any]


def collected(folder: Path) -> list[dict[str, Any]]:
    """Return the noise floor and the seconds per sequence of every validation in this folder."""
    runs = []
    for path in sorted(folder.glob("*/validation.json")):
        document = json.loads(path.read_text())
        rows = [{key: row[key] for key in OF_ROW} for row in document["rows"]]
        runs.append({**{key: document[key] for key in OF_RUN}, "rows": rows})
    return runs


def spread_percent(runs: Sequence[Run]) -> tuple[float, float]:
    """Standard deviation of a speedup (of its logarithm) from run to run, pooled over rows; degrees of freedom."""
    by_row: dict[str, list[float]] = {}
    for run in runs:
        baseline_s = sum(run["autoregressive_sequence_seconds"])
        for row in run["rows"]:
            by_row.setdefault(row["label"], []).append(float(np.log(baseline_s / sum(row["sequence_seconds"]))))
    several = [values for values in by_row.values() if len(values) > 1]
    squares = sum(np.var(values) * len(values) for values in several)
    freedom = sum(len(values) - 1 for values in several)
    return 100 * float(np.sqrt(squares / freedom)), freedom


def pooled_percent(sets: Mapping[str, Sequence[Run]]) -> float:
    """The standard deviation of all sets."""
    spreads = [spread_percent(runs) for runs in sets.values()]
    squares = sum(percent**2 * freedom for percent, freedom in spreads)
    return float(np.sqrt(squares / sum(freedom for _, freedom in spreads)))


def run_rows(sets: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return a row of every set: its noise floors, and the deviation between runs."""
    rows = []
    for name, runs in sets.items():
        percent, _ = spread_percent(runs)
        floors = [run["noise_floor_percent"] for run in runs]
        rows.append(
            {
                "set": name,
                "runs": len(runs),
                "noise_floor_percent_low": min(floors),
                "noise_floor_percent_high": max(floors),
                "between_runs_percent": percent,
            }
        )
    return rows


if __name__ == "__main__":
    write_json({"sets": {Path(name).name: collected(Path(name)) for name in sys.argv[1:]}}, Path(RUNS))
