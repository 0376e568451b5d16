"""Two measurements of the same things, before and after: did this commit slow speculation down?

A validation's rows are compared in pairs of sequences, as speedups over the baseline that ran beside them, so that a
machine that is faster as a whole does not count. What is left varies from run to run by more than from sequence to
sequence: passes of one size get dearer beside those of another. So the error of a change has two parts, that over
sequences and that between runs of one commit, which no single run can show. A row has changed where its p value,
corrected for the number of rows (Holm 1979), is below 5 %, and the change lies beyond the noise floors of both runs.
Kernels' and pytest-benchmark's times have neither pairs nor null arms: they change where both spreads leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specsim.arrays import Floats
from specsim.claims.runs import VALIDATION_KIND, floor_percent, run_columns
from specsim.errors import InputError
from specsim.json_files import read_json
from specsim.results import BENCH_KIND
from specsim.speedup.intervals import Estimate, log_ratio_error

Change = Literal["slower", "faster", "no change", "not comparable"]
KERNEL_KEYS = ("op", "label", "dtype", "backend", "mode")  # of a benchmark's row, which name it
SIGNIFICANCE = 0.05
KERNEL_FLOOR_PERCENT = 5.0  # of times without a null arm
BETWEEN_RUNS_PERCENT = 1.0  # standard deviation of a speedup between runs of one commit: docs/claims.md, "Two runs"


@dataclass(frozen=True)
class Line:
    """One row before and after.

    old, new : speedups, or seconds of a kernel
    ratio : new performance over old, so that below 1 is slower; None where the two cannot be compared
    """

    name: str
    old: float | None
    new: float | None
    ratio: Estimate | None
    change: Change
    note: str = ""


@dataclass(frozen=True)
class Diff:
    """All rows, and what noise allows to see."""

    quantity: str
    floor_percent: float
    lines: tuple[Line, ...]

    @property
    def slower(self) -> list[Line]:
        return [line for line in self.lines if line.change == "slower"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": "specsim-diff",
            "quantity": self.quantity,
            "noise_floor_percent": self.floor_percent,
            "slower": [line.name for line in self.slower],
            "rows": [asdict(line) for line in self.lines],
        }


def read_diff(old: Path, new: Path, *, between_runs_percent: float | None = None) -> Diff:
    """Compare two files of one kind: validations, files of `speckernels bench`, or of pytest-benchmark.

    between_runs_percent : standard deviation of a speedup between runs of one commit; of times, the least gap
    """
    before, after = (_document(path) for path in (old, new))
    kinds = [_kind(document, path) for document, path in ((before, old), (after, new))]
    if kinds[0] != kinds[1]:
        raise InputError(f"{old} is {kinds[0]}, {new} is {kinds[1]}; compare two of one kind")
    if kinds[0] == VALIDATION_KIND:
        between = BETWEEN_RUNS_PERCENT if between_runs_percent is None else between_runs_percent
        return diff_validations(before, after, str(old), str(new), between_runs_percent=between)
    floor = KERNEL_FLOOR_PERCENT if between_runs_percent is None else between_runs_percent
    read = _kernel_times if kinds[0] == BENCH_KIND else _benchmark_times
    return _diff_times(read(before, str(old)), read(after, str(new)), floor)


def diff_validations(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    old: str,
    new: str,
    *,
    between_runs_percent: float = BETWEEN_RUNS_PERCENT,
) -> Diff:
    """Compare the measured speedups of two validations of the same prompts, row by row with the same settings."""
    floors = [floor_percent(one, where) for one, where in ((before, old), (after, new))]
    floor = math.hypot(*floors)
    rows = [_rows(document, where) for document, where in ((before, old), (after, new))]
    compared: list[tuple[str, float, float, Estimate, float]] = []
    others: list[Line] = []
    for name in [*rows[0], *(name for name in rows[1] if name not in rows[0])]:
        first, second = (found.get(name) for found in rows)
        if first is None or second is None:
            present, which = (first, "old") if second is None else (second, "new")
            assert present is not None
            value = _speedup(present)
            old_value, new_value = (value, None) if which == "old" else (None, value)
            others.append(Line(name, old_value, new_value, None, "not comparable", f"only in the {which} run"))
            continue
        pair = [
            run_columns(document, row, "speedup", where)
            for document, row, where in ((before, first, old), (after, second, new))
        ]
        assert pair[0] is not None and pair[1] is not None
        if pair[0].key != pair[1].key or pair[0].key[1] is None:
            others.append(
                Line(name, _speedup(first), _speedup(second), None, "not comparable", "other sequences were decoded")
            )
            continue
        columns = (pair[1].top, pair[1].bottom, pair[0].top, pair[0].bottom)
        compared.append((name, _speedup(first), _speedup(second), *change(*columns, between_runs_percent)))
    if not compared:
        raise InputError(f"{old} and {new} have no row in common with the same settings on the same prompts")
    significant = holm([p for *_, p in compared])
    lines = []
    for (name, was, now, ratio, _), changed in zip(compared, significant, strict=True):
        beyond = abs(math.log(ratio.estimate)) > math.log1p(floor / 100)
        verdict: Change = "no change" if not (changed and beyond) else "slower" if ratio.estimate < 1 else "faster"
        lines.append(Line(name, was, now, ratio, verdict, "" if beyond or not changed else "within the noise floor"))
    return Diff("speedup", floor, (*lines, *others))


def holm(p_values: list[float], significance: float = SIGNIFICANCE) -> list[bool]:
    """Which hypotheses fall when all of them shall err with this probability together (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    falls = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > significance / (len(p_values) - rank):
            break
        falls[index] = True
    return falls


def change(
    a_top: Floats, a_bottom: Floats, b_top: Floats, b_bottom: Floats, between_runs_percent: float
) -> tuple[Estimate, float]:
    """A ratio of sequences [S] over that of another run of them, with its 95 % interval, and the p value of no change.

    Student's t on the logarithm. Its error is that over sequences, in pairs, and that between the two runs, which is
    given; degrees of freedom are Welch's and Satterthwaite's.
    """
    from scipy.special import stdtr, stdtrit

    value = float(a_top.sum() / a_bottom.sum() / (b_top.sum() / b_bottom.sum()))
    over_sequences = log_ratio_error(a_top, a_bottom, b_top, b_bottom) if a_top.size > 1 else math.inf
    between = math.sqrt(2) * math.log1p(between_runs_percent / 100)
    error = math.hypot(over_sequences, between)
    if not math.isfinite(error):
        return Estimate(value, 0.0, math.inf), 1.0
    if error == 0:
        return Estimate.exact(value), float(value == 1)
    freedom = (a_top.size - 1) * (error / over_sequences) ** 4 if over_sequences else math.inf
    freedom = min(freedom, 1e9)
    factor = math.exp(float(stdtrit(freedom, 0.975)) * error)
    return Estimate(value, value / factor, value * factor), float(2 * stdtr(freedom, -abs(math.log(value)) / error))


def _rows(document: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    rows = document.get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("label"), str) for row in rows
    ):
        raise InputError(f"{where}: its rows have no labels; validate again")
    return {row["label"]: row for row in rows}


def _speedup(row: Mapping[str, Any]) -> float:
    measured = row.get("measured")
    value = measured.get("estimate") if isinstance(measured, dict) else None
    if not isinstance(value, int | float) or not np.isfinite(value):
        raise InputError(f"row {row.get('label')!r} has no measured speedup; validate again")
    return float(value)


Times = dict[str, tuple[float, float, float]]  # name -> median, lower and upper end of the spread, seconds


def _diff_times(before: Times, after: Times, floor: float) -> Diff:
    lines = []
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in before or name not in after:
            which, of = ("old", before) if name in before else ("new", after)
            old_s, new_s = (of[name][0], None) if which == "old" else (None, of[name][0])
            lines.append(Line(name, old_s, new_s, None, "not comparable", f"only in the {which} file"))
            continue
        was, now = before[name], after[name]
        ratio = Estimate(was[0] / now[0], was[1] / now[2], was[2] / now[1])
        reach = 1 + floor / 100
        change: Change = "slower" if ratio.high < 1 / reach else "faster" if ratio.low > reach else "no change"
        lines.append(Line(name, was[0], now[0], ratio, change))
    if not any(line.ratio for line in lines):
        raise InputError("the two files have no row in common; compare two runs of the same cases")
    return Diff("seconds", floor, tuple(lines))


def _kernel_times(document: Mapping[str, Any], where: str) -> Times:
    found: Times = {}
    for row in document["rows"]:
        name = " ".join(str(row.get(key)) for key in KERNEL_KEYS)
        if row.get("median_us") is not None:
            found[name] = _spread([row.get(key) for key in ("median_us", "p20_us", "p80_us")], 1e-6, f"{where}: {name}")
    return found


def _benchmark_times(document: Mapping[str, Any], where: str) -> Times:
    found: Times = {}
    for row in document["benchmarks"]:
        stats = row.get("stats")
        if not isinstance(stats, dict):
            raise InputError(f"{where}: benchmark {row.get('fullname')!r} has no stats; run it again")
        keys = ("median", "q1", "q3")
        found[str(row.get("fullname"))] = _spread([stats.get(key) for key in keys], 1.0, where)
    return found


def _spread(values: list[Any], unit_s: float, where: str) -> tuple[float, float, float]:
    if not all(isinstance(value, int | float) and np.isfinite(value) and value > 0 for value in values):
        raise InputError(f"{where}: a time is no positive number; measure again")
    median, low, high = (value * unit_s for value in values)
    return median, min(low, median), max(high, median)


def _document(path: Path) -> dict[str, Any]:
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"file {path}", missing="check the path", invalid="make it again")
    if not isinstance(document, dict):
        raise InputError(f"{path} is no measurement; give a validation, or a file of a benchmark")
    return document


def _kind(document: Mapping[str, Any], path: Path) -> str:
    kind = document.get("kind")
    if kind in (VALIDATION_KIND, BENCH_KIND):
        rows = document.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{path} has no rows; make it again")
        return str(kind)
    rows = document.get("benchmarks")
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return "pytest-benchmark"
    raise InputError(
        f"{path} is no measurement; give a validation, or a file of `speckernels bench` or pytest-benchmark"
    )
