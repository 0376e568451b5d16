"""What every subject of a claim comes out as, and what those of JSON documents do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from specsim.arrays import Floats
from specsim.claims.claim import ValueSubject
from specsim.errors import InputError
from specsim.json_files import read_json
from specsim.speedup.intervals import Estimate, ratio_interval

Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # of files: name, time of the last change, size


@dataclass(frozen=True)
class PerSequence:
    """A ratio of sums over sequences: both sums' parts [S], and whose they are, so that two can be compared in pairs.

    key : equal for subjects of the same sequences
    """

    top: Floats
    bottom: Floats
    key: Any


@dataclass(frozen=True)
class Measured:
    """A value, with the doubt about it.

    record : what it may be of these very sequences: the value alone where nothing was timed, else with the noise floor
    prompts : what it may be of prompts like these, 95 %
    floor_percent : the noise floor of measured seconds, 0 of what is computed
    seconds : per sequence [S], and tokens [S], of what takes time; None of other values
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
        raise InputError("the ratio has nothing below: no round or no token is counted; choose another quantity")
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
    """A plain number, an estimate with its interval, or the mean of a list, whose entries are sequences."""
    if isinstance(value, dict) and {"estimate", "low", "high"} <= set(value):
        numbers = [value[key] for key in ("estimate", "low", "high")]
        if all(is_number(number) for number in numbers):
            estimate = float(numbers[0])
            return Measured(estimate, Estimate.exact(estimate), Estimate(*map(float, numbers)))
    if isinstance(value, list) and value and all(is_number(one) and one >= 0 for one in value):
        entries = np.asarray(value, dtype=np.float64)
        return from_columns(PerSequence(entries, np.ones(entries.shape), ("list", where)))
    if not is_number(value):
        raise InputError(f"{where}: what is claimed is no number but {str(value)[:40]!r}; name a number")
    exact = Estimate.exact(float(value))
    return Measured(exact.estimate, exact, exact)


def in_document(subject: ValueSubject, path: Path) -> Measured:
    document, where = _document(path), str(path)
    found = found_at(document, subject.at, where)
    if subject.over is None:
        return as_measured(found, where)
    top = not_negative(found, f"{where}: what at leads to")
    bottom = positive(found_at(document, subject.over, where), f"{where}: what over leads to")
    if top.shape != bottom.shape:
        raise InputError(f"{where}: at and over are lists of different lengths; name lists of the same sequences")
    return from_columns(PerSequence(top, bottom, ("list", where)))


def found_at(document: Any, at: list[Any], where: str) -> Any:
    """What lies at the end of this way through a JSON document."""
    found = document
    for number, step in enumerate(at, start=1):
        place = f"{where}: step {number} of at, {str(step)[:60]}"
        if isinstance(step, str) and isinstance(found, dict):
            if step not in found:
                raise InputError(f"{place}: there is no such key; there are {', '.join(map(str, list(found)[:12]))}")
            found = found[step]
        elif isinstance(step, int) and isinstance(found, list):
            if step >= len(found):
                raise InputError(f"{place}: the list has {len(found)} entries, counted from 0")
            found = found[step]
        elif isinstance(step, dict) and isinstance(found, list):
            fitting = [one for one in found if isinstance(one, dict) and step.items() <= _plain(one).items()]
            if len(fitting) != 1:
                raise InputError(f"{place}: {len(fitting)} entries have these values; name exactly one")
            found = fitting[0]
        else:
            raise InputError(f"{place}: there is no {'list' if isinstance(found, dict) else 'object'} to take it from")
    return found


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if isinstance(value, str | int | float)}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _document(path: Path) -> Any:
    return _read_document(path, stamp_of(path))


@lru_cache(maxsize=8)  # many claims are of one document
def _read_document(path: Path, stamp: Stamp) -> Any:
    return read_json(path, f"document {path}", missing="check the path", invalid="make it again")


def stamp_of(path: Path) -> Stamp:
    """What changes where a file, or one in this folder, does; nothing of what is not there, or cannot be looked at."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        states = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:  # such as a name that is too long: who reads it says why
        return ()
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


def not_negative(values: Any, where: str) -> Floats:
    if not isinstance(values, list) or not values or not all(is_number(one) and one >= 0 for one in values):
        raise InputError(f"{where} is no list of numbers from 0 on; name another")
    return np.asarray(values, dtype=np.float64)


def positive(values: Any, where: str) -> Floats:
    if not isinstance(values, list) or not values or not all(is_number(one) and one > 0 for one in values):
        raise InputError(f"{where} is no list of positive numbers; validate again")
    return np.asarray(values, dtype=np.float64)
