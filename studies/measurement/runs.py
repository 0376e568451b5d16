"""How far runs of one commit lie apart: `python -m studies.measurement.runs FOLDER...` collects the validations there.

Every folder holds a set: validations of one commit on the same prompts, each in a folder of its own. Writes runs.json,
from which run.py writes its table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from specsim.claims.diff import BETWEEN_RUNS_PERCENT, diff_validations
from specsim.files import write_json
from specsim.report.markdown import markdown_table

RUNS = "runs.json"
OF_RUN = ("noise_floor_percent", "autoregressive_sequence_seconds")
OF_ROW = ("label", "sequence_seconds", "sequence_tokens")
Run = Mapping[str, Any]


def collected(folder: Path) -> list[dict[str, Any]]:
    """Of every validation in this folder what two of them are compared by."""
    found = []
    for path in sorted(folder.glob("*/validation.json")):
        document = json.loads(path.read_text())
        rows = [{key: row[key] for key in OF_ROW} for row in document["rows"]]
        found.append({**{key: document[key] for key in OF_RUN}, "rows": rows})
    return found


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
    found = [spread_percent(runs) for runs in sets.values()]
    squares = sum(percent**2 * freedom for percent, freedom in found)
    return float(np.sqrt(squares / sum(freedom for _, freedom in found)))


def runs_table(sets: Mapping[str, Sequence[Run]]) -> list[str]:
    """Every set, and all of them pooled."""
    rows = []
    for name, runs in sets.items():
        percent, _ = spread_percent(runs)
        pairs = [diff_validations([("a", a)], [("b", b)]) for a, b in combinations(runs, 2)]
        changed = sum(any(line.change in ("slower", "faster") for line in pair.lines) for pair in pairs)
        floors = [run["noise_floor_percent"] for run in runs]
        ends = f"{min(floors):.2f} to {max(floors):.2f}"
        rows.append([name, str(len(runs)), ends, f"{percent:.2f}", str(len(pairs)), str(changed)])
    rows.append(["all, pooled", "", "", f"{pooled_percent(sets):.2f}", "", ""])
    columns = ["set", "runs", "noise floors, %", "standard deviation between runs, %", "pairs", "pairs with a change"]
    return markdown_table(columns, rows)


def section(sets: Mapping[str, Sequence[Run]]) -> list[str]:
    return [
        "## Runs of one commit",
        "",
        "Validations of the lab (the options of `nox -s demo`), some beside other work: speedups vary from run to run "
        "by more than a noise floor tells. The standard deviation is that of a row's speedup, pooled over rows that "
        "two runs or more have in common. A pair with a change is one in which `specsim claims diff` finds a "
        f"row slower or faster, with {BETWEEN_RUNS_PERCENT} % between runs as its default has it.",
        "",
        *runs_table(sets),
    ]


if __name__ == "__main__":
    write_json({"sets": {Path(name).name: collected(Path(name)) for name in sys.argv[1:]}}, Path(RUNS))
