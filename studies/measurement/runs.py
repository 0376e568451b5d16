"""Spread of runs of the same commit: `python -m studies.measurement.runs FOLDER...` collects the validations there.

Every folder holds a set: validations of the same commit on the same prompts, each in a folder of its own. Writes
runs.json, which run.py reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from specsim.io.files import write_json

RUNS = "runs.json"


@dataclass(frozen=True)
class PolicyRun:
    """A policy's decoding of the held-out prompts."""

    label: str
    sequence_seconds: list[float]
    sequence_tokens: list[int]


@dataclass(frozen=True)
class Run:
    """A validation: its noise floor, seconds without speculation by sequence, and its policies."""

    noise_floor_percent: float
    autoregressive_sequence_seconds: list[float]
    rows: list[PolicyRun]

    @classmethod
    def from_json(cls, document: Any) -> Run:
        """Read what is needed of a validation, or of runs.json."""
        rows = [PolicyRun(**{field.name: row[field.name] for field in fields(PolicyRun)}) for row in document["rows"]]
        return cls(document["noise_floor_percent"], document["autoregressive_sequence_seconds"], rows)


@dataclass(frozen=True)
class SetOfRuns:
    """A row of table.csv: runs of a commit, their noise floors, and a speedup's standard deviation between them."""

    set: str
    runs: int
    noise_floor_percent_low: float
    noise_floor_percent_high: float
    between_runs_percent: float

    def __str__(self) -> str:
        return (
            f"{self.set}, {self.runs} runs with noise floors up to {self.noise_floor_percent_high:.2f} % and a "
            f"standard deviation of {self.between_runs_percent:.2f} % from run to run"
        )


def collected(folder: Path) -> list[Run]:
    """Read every validation in this folder."""
    return [Run.from_json(json.loads(path.read_text())) for path in sorted(folder.glob("*/validation.json"))]


def read_runs(path: Path) -> dict[str, list[Run]]:
    """Read the sets of runs.json."""
    sets = json.loads(path.read_text())["sets"]
    return {name: [Run.from_json(run) for run in runs] for name, runs in sets.items()}


def spread_percent(runs: Sequence[Run]) -> tuple[float, float]:
    """Standard deviation of a speedup (of its logarithm) from run to run, pooled over rows; degrees of freedom."""
    by_row: dict[str, list[float]] = {}
    for run in runs:
        baseline_s = sum(run.autoregressive_sequence_seconds)
        for row in run.rows:
            by_row.setdefault(row.label, []).append(float(np.log(baseline_s / sum(row.sequence_seconds))))
    several = [values for values in by_row.values() if len(values) > 1]
    squares = sum(np.var(values) * len(values) for values in several)
    freedom = sum(len(values) - 1 for values in several)
    return 100 * float(np.sqrt(squares / freedom)), freedom


def pooled_percent(sets: Mapping[str, Sequence[Run]]) -> float:
    """The standard deviation of all sets."""
    spreads = [spread_percent(runs) for runs in sets.values()]
    squares = sum(percent**2 * freedom for percent, freedom in spreads)
    return float(np.sqrt(squares / sum(freedom for _, freedom in spreads)))


def run_rows(sets: Mapping[str, Sequence[Run]]) -> list[SetOfRuns]:
    """Return a row of every set."""
    floors = {name: [run.noise_floor_percent for run in runs] for name, runs in sets.items()}
    return [
        SetOfRuns(name, len(runs), min(floors[name]), max(floors[name]), spread_percent(runs)[0])
        for name, runs in sets.items()
    ]


if __name__ == "__main__":
    sets = {Path(name).name: [asdict(run) for run in collected(Path(name))] for name in sys.argv[1:]}
    write_json({"sets": sets}, Path(RUNS))
