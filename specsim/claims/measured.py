"""The measured value of a claim's subject, with its doubt; subjects that are values of documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from specsim.claims.claim import ValueSubject
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import read_csv
from specsim.io.json import read_json
from specsim.replaying.intervals import Estimate, ratio_interval

Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # of files: name, time of the last change, size


@dataclass(frozen=True)
class PerSequence:
    """A ratio of sums over sequences: numerators and denominators [S].

    key : equal for subjects of the same sequences, which can be compared in pairs
    """

    top: Floats
    bottom: Floats
    key: Any


@dataclass(frozen=True)
class Measured:
    """A value with its intervals.

    record : interval for these very sequences: the value alone where nothing was timed, else with the noise floor
    prompts : 95 % interval for prompts like these
    floor_percent : noise floor of measured seconds; 0 for computed values
    seconds : seconds and tokens per sequence [S], where the value comes from times
    """

    value: float
    record: Estimate
    prompts: Estimate
    floor_percent: float = 0.0
    per_sequence: PerSequence | None = None
    seconds: tuple[Floats, Floats] | None = None


def from_columns(columns: PerSequence, *, average: str = "tokens", floor_percent: float = 0.0) -> Measured:
    """The ratio of two columns, with its interval over sequences and that of the noise of seconds."""
    top, bottom = columns.top, columns.bottom
    if average == "sequences":
        top, bottom = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0), np.ones(top.shape)
    if not bottom.sum() > 0:
        raise InputError("the denominator is 0: no round or no token is counted; choose another quantity")
    over = ratio_interval(top, bottom)
    factor = 1 + floor_percent / 100
    return Measured(
        over.estimate,
        Estimate(over.estimate, over.estimate / factor, over.estimate * factor),
        Estimate(over.estimate, over.low / factor, over.high * factor),
        floor_percent,
        PerSequence(top, bottom, columns.key),
    )


def as_measured(value: Any, where: str) -> Measured:
    """Read a number, an estimate with its interval, or the mean of a list with an entry per sequence."""
    if isinstance(value, dict) and {"estimate", "low", "high"} <= set(value):
        numbers = [value[key] for key in ("estimate", "low", "high")]
        if all(is_number(number) for number in numbers):
            estimate = float(numbers[0])
            return Measured(estimate, Estimate.exact(estimate), Estimate(*map(float, numbers)))
    if isinstance(value, list) and value and all(is_number(entry) and entry >= 0 for entry in value):
        entries = np.asarray(value, dtype=np.float64)
        return from_columns(PerSequence(entries, np.ones(entries.shape), ("list", where)))
    if not is_number(value):
        raise InputError(f"{where}: the claimed value is not a number but {str(value)[:40]!r}; name a number")
    exact = Estimate.exact(float(value))
    return Measured(exact.estimate, exact, exact)


def of_value(subject: ValueSubject, home: Path) -> Measured:
    """Evaluate a claim's number of a document."""
    path = home / subject.document
    return as_measured(value_at(_read_document(path, stamp_of(path)), subject.at, str(path)), str(path))


def value_at(document: Any, at: list[Any], where: str) -> Any:
    """Follow a path through a document; InputError names the step that does not fit."""
    value = document
    for number, step in enumerate(at, start=1):
        place = f"{where}: step {number} of at, {str(step)[:60]}"
        if isinstance(step, str) and isinstance(value, dict):
            if step not in value:
                raise InputError(f"{place}: there is no such key; keys: {', '.join(map(str, list(value)[:12]))}")
            value = value[step]
        elif isinstance(step, int) and isinstance(value, list):
            if step >= len(value):
                raise InputError(f"{place}: the list has {len(value)} entries, counted from 0")
            value = value[step]
        elif isinstance(step, dict) and isinstance(value, list):
            entries = [entry for entry in value if isinstance(entry, dict) and step.items() <= _plain(entry).items()]
            if len(entries) != 1:
                raise InputError(f"{place}: {len(entries)} entries have these values; name a single entry")
            value = entries[0]
        else:
            raise InputError(f"{place}: there is no {'object' if isinstance(step, str) else 'list'} here")
    return value


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if isinstance(value, str | int | float)}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


@lru_cache(maxsize=8)  # many claims are about the same document
def _read_document(path: Path, stamp: Stamp) -> Any:
    """Read a JSON document, or a CSV table as a list of its rows."""
    if path.suffix == ".csv":
        rows = read_csv(path, f"document {path}", "check the path").to_dict("records")
        return [{column: _number_or_text(cell) for column, cell in row.items()} for row in rows]
    return read_json(path, f"document {path}", missing="check the path", invalid="make it again")


def _number_or_text(cell: Any) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def stamp_of(path: Path) -> Stamp:
    """Cache key: names, mtimes and sizes of the file or of the folder's files; empty if unreadable."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        states = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:  # such as a name that is too long; reading it raises the error
        return ()
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


def positive(values: Any, where: str) -> Floats:
    """A list of positive numbers as an array; InputError for anything else."""
    if not isinstance(values, list) or not values or not all(is_number(value) and value > 0 for value in values):
        raise InputError(f"{where} is not a list of positive numbers; validate again")
    return np.asarray(values, dtype=np.float64)
