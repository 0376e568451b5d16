"""Compare two measurements, before and after a commit, and tell which rows became slower.

Rows of validations are compared in pairs of sequences, as speedups over the baseline of the same run, so that a faster
machine does not count. The error of a change has two parts: over sequences, and between runs of the same commit, which
is larger and which a single run cannot show; several runs a side make it smaller. A row has changed if its p value,
corrected for the number of rows (Holm 1979), is below 5 %, and the change exceeds the noise floors of both sides.
Times of kernels and pytest-benchmark have neither pairs nor an A/A test: they change if their spreads leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from specsim.claims.measured import PerSequence
from specsim.claims.runs import VALIDATION_KIND, floor_percent, run_columns
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.replaying.intervals import Estimate, log_ratio_error
from specsim.report.result_files import BENCH_KIND

Change = Literal["slower", "faster", "no change", "not comparable"]
Runs: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]  # validations before or after: path and document of each
KERNEL_KEYS = ("op", "label", "dtype", "backend", "mode")  # of a benchmark's row, which name it
SIGNIFICANCE = 0.05
KERNEL_FLOOR_PERCENT = 5.0  # of times without a null arm
BETWEEN_RUNS_PERCENT = 1.7  # standard deviation of a speedup between runs of a commit: docs/claims.md, "Two runs"


@dataclass(frozen=True)
class Line:
    """One row before and after.

    old, new : speedups, or seconds of a kernel
    ratio : new performance over old, so that below 1 is slower; None if they are not comparable
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


def read_diff(
    old: Path,
    new: Path,
    *,
    more_old: Sequence[Path] = (),
    more_new: Sequence[Path] = (),
    between_runs_percent: float | None = None,
) -> Diff:
    """Compare two files of the same kind: validations, files of `speckernels bench`, or of pytest-benchmark.

    more_old, more_new : further validations of either side
    between_runs_percent : standard deviation of a speedup between runs of a commit; of times, the least gap
    """
    sides = [old, *more_old], [new, *more_new]
    before, after = ([(str(path), _document(path)) for path in side] for side in sides)
    kinds = {_kind(document, path) for path, document in (*before, *after)}
    if len(kinds) != 1:
        raise InputError(
            f"{old} and {new} are of different kinds, {', '.join(sorted(kinds))}; compare files of the same kind"
        )
    (kind,) = kinds
    if kind == VALIDATION_KIND:
        between = BETWEEN_RUNS_PERCENT if between_runs_percent is None else between_runs_percent
        return diff_validations(before, after, between_runs_percent=between)
    if more_old or more_new:
        raise InputError("several runs of a side must be validations; give a single benchmark file for each side")
    floor = KERNEL_FLOOR_PERCENT if between_runs_percent is None else between_runs_percent
    read = _kernel_times if kind == BENCH_KIND else _benchmark_times
    return _diff_times(read(before[0][1], str(old)), read(after[0][1], str(new)), floor)


def diff_validations(before: Runs, after: Runs, *, between_runs_percent: float = BETWEEN_RUNS_PERCENT) -> Diff:
    """Compare the measured speedups of validations of the same prompts, row by row with the same settings.

    Runs of a side are taken together: the seconds of a sequence are the sum of theirs.
    """
    sides = [[(where, document, _rows(document, where)) for where, document in side] for side in (before, after)]
    floor = math.hypot(*(floor_percent(document, where) / len(side) for side in sides for where, document, _ in side))
    between = between_runs_percent * math.sqrt(1 / len(before) + 1 / len(after))
    compared: list[tuple[str, float, float, Estimate, float]] = []
    others: list[Line] = []
    for name in dict.fromkeys(name for side in sides for *_, rows in side for name in rows):
        old, new = (
            [run_columns(document, rows[name], "speedup", where) for where, document, rows in side if name in rows]
            for side in sides
        )
        was, now = _summed(old), _summed(new)
        if was is None or now is None:
            note = "only in the new run" if was is None else "only in the old run"
        elif (len(old), len(new)) != (len(before), len(after)):
            note = "not in every run"
        elif was.key is None or was.key != now.key:
            note = "other sequences were decoded"
        else:
            ratio_and_p = change(now.top, now.bottom, was.top, was.bottom, between)
            compared.append((name, _speedup(was), _speedup(now), *ratio_and_p))
            continue
        first, second = (None if side is None else _speedup(side) for side in (was, now))
        others.append(Line(name, first, second, None, "not comparable", note))
    if not compared:
        names = " and ".join(where for side in (before, after) for where, _ in side)
        raise InputError(f"{names} have no row in common with the same settings on the same prompts")
    significant = holm([p for *_, p in compared])
    lines = []
    for (name, before_it, after_it, ratio, _), changed in zip(compared, significant, strict=True):
        beyond = abs(math.log(ratio.estimate)) > math.log1p(floor / 100)
        verdict: Change = "no change" if not (changed and beyond) else "slower" if ratio.estimate < 1 else "faster"
        note = "" if beyond or not changed else "within the noise floor"
        lines.append(Line(name, before_it, after_it, ratio, verdict, note))
    return Diff("speedup", floor, (*lines, *others))


def _summed(runs: Sequence[PerSequence | None]) -> PerSequence | None:
    """Sum the runs of a side; without a key where they are of different sequences; None for no runs."""
    columns = [run for run in runs if run is not None]
    if not columns:
        return None
    if len({run.key for run in columns}) > 1 or columns[0].key[1] is None:
        return replace(columns[0], key=None)
    top, bottom = (np.sum([getattr(run, end) for run in columns], axis=0) for end in ("top", "bottom"))
    return replace(columns[0], top=top, bottom=bottom)


def holm(p_values: list[float]) -> list[bool]:
    """Tell which null hypotheses are rejected at a family-wise error rate of SIGNIFICANCE (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    falls = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > SIGNIFICANCE / (len(p_values) - rank):
            break
        falls[index] = True
    return falls


def change(
    a_top: Floats, a_bottom: Floats, b_top: Floats, b_bottom: Floats, between_percent: float
) -> tuple[Estimate, float]:
    """A ratio of sequences [S] over that of another side, with its 95 % interval, and the p value of no change.

    Student's t on the logarithm. Its error is that over sequences, in pairs, and that between the sides' runs, which is
    given; degrees of freedom are Welch's and Satterthwaite's.
    """
    from scipy.special import stdtr, stdtrit

    value = float(a_top.sum() / a_bottom.sum() / (b_top.sum() / b_bottom.sum()))
    over_sequences = log_ratio_error(a_top, a_bottom, b_top, b_bottom) if a_top.size > 1 else math.inf
    error = math.hypot(over_sequences, math.log1p(between_percent / 100))
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


def _speedup(columns: PerSequence) -> float:
    return float(columns.top.sum() / columns.bottom.sum())


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
    times: Times = {}
    for row in document["rows"]:
        name = " ".join(str(row.get(key)) for key in KERNEL_KEYS)
        if row.get("median_us") is not None:
            times[name] = _spread([row.get(key) for key in ("median_us", "p20_us", "p80_us")], 1e-6, f"{where}: {name}")
    return times


def _benchmark_times(document: Mapping[str, Any], where: str) -> Times:
    times: Times = {}
    for row in document["benchmarks"]:
        stats = row.get("stats")
        if not isinstance(stats, dict):
            raise InputError(f"{where}: benchmark {row.get('fullname')!r} has no stats; run it again")
        keys = ("median", "q1", "q3")
        times[str(row.get("fullname"))] = _spread([stats.get(key) for key in keys], 1.0, where)
    return times


def _spread(values: list[Any], unit_s: float, where: str) -> tuple[float, float, float]:
    if not all(isinstance(value, int | float) and np.isfinite(value) and value > 0 for value in values):
        raise InputError(f"{where}: a time is not a positive number; measure again")
    median, low, high = (value * unit_s for value in values)
    return median, min(low, median), max(high, median)


def _document(path: Path) -> dict[str, Any]:
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"file {path}", missing="check the path", invalid="make it again")
    if not isinstance(document, dict):
        raise InputError(f"{path} is not a measurement; give a validation, or a file of a benchmark")
    return document


def _kind(document: Mapping[str, Any], path: str) -> str:
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
        f"{path} is not a measurement; give a validation, or a file of `speckernels bench` or pytest-benchmark"
    )
