"""Spread of runs of the same commit: `python -m studies.measurement.runs FOLDER...` collects the validations there.

Every folder holds a set: validations of the same commit on the same prompts, each in a folder of its own. Writes
runs.json, which run.py reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from specsim.io.files import write_json
from studies.common import Document

RUNS = "runs.json"
FLOOR, BASELINE_S, SECONDS = "noise_floor_percent", "autoregressive_sequence_seconds", "sequence_seconds"
Sets = Mapping[str, Sequence[Document]]  # validations by the set's name


def collected(folder: Path) -> list[Document]:
    """Read noise floor and seconds of every validation in this folder."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*/validation.json"))]
    rows = [[{key: row[key] for key in ("label", SECONDS)} for row in run["rows"]] for run in runs]
    return [{FLOOR: run[FLOOR], BASELINE_S: run[BASELINE_S], "rows": own} for run, own in zip(runs, rows, strict=True)]


def read_runs(path: Path) -> dict[str, list[Document]]:
    """Read the sets of runs.json."""
    return dict(json.loads(path.read_text())["sets"])


def spread_percent(sets: Sets) -> float:
    """Compute the standard deviation of a speedup (of its logarithm) from run to run, pooled over policies and sets."""
    logs = pd.DataFrame(
        [
            (name, row["label"], np.log(sum(run[BASELINE_S]) / sum(row[SECONDS])))
            for name, runs in sets.items()
            for run in runs
            for row in run["rows"]
        ],
        columns=["set", "label", "log_speedup"],
    )
    groups = logs.groupby(["set", "label"])["log_speedup"]
    squares = ((logs["log_speedup"] - groups.transform("mean")) ** 2).sum()
    return 100 * float(np.sqrt(squares / (len(logs) - groups.ngroups)))


def run_rows(sets: Sets) -> list[Document]:
    """Return a row of table.csv for every set: its runs, their noise floors, and the spread between them."""
    floors = {name: [run[FLOOR] for run in runs] for name, runs in sets.items()}
    return [
        {
            "set": name,
            "runs": len(runs),
            f"{FLOOR}_low": min(floors[name]),
            f"{FLOOR}_high": max(floors[name]),
            "between_runs_percent": spread_percent({name: runs}),
        }
        for name, runs in sets.items()
    ]


if __name__ == "__main__":
    write_json({"sets": {Path(name).name: collected(Path(name)) for name in sys.argv[1:]}}, Path(RUNS))
