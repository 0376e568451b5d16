"""Tables of the five papers as printed, and the intervals of numbers that round to their cells."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from specsim.io.errors import InputError
from specsim.io.files import digest

DATA = Path(__file__).parent / "data"
PAPERS = {  # key: title, arXiv id (empty if there is none)
    "eesd": ("EESD, speculative decoding via early exiting with Thompson sampling control", "2406.03853"),
    "edd": ("EDD + PCT, effective draft decoder with pruned candidate tree", ""),
    "space": ("SPACE, smart parallel auto-correct decoding", "2402.11809"),
    "adaedl": ("AdaEDL, early draft stopping by entropy", "2410.18351"),
    "medusa": ("MEDUSA, multiple decoding heads", "2401.10774"),
}
SLACK = 1e-9  # decimals are not exact binary fractions


class Interval(NamedTuple):
    """Closed interval of numbers."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """Range of these values."""
        return cls(min(values), max(values))

    def meets(self, other: Interval) -> bool:
        """Whether the intervals overlap."""
        return self.low <= other.high + SLACK and other.low <= self.high + SLACK

    def contains(self, value: float) -> bool:
        return self.meets(Interval(value, value))


def rounded_to(text: str) -> Interval:
    """Numbers that round to a printed decimal: half a unit of its last digit to both sides."""
    digits = len(text.partition(".")[2])
    half = 0.5 * 10.0**-digits
    return Interval(float(text) - half, float(text) + half)


def recompute(function: Callable[..., float], *cells: str) -> tuple[float, Interval]:
    """Value of a function of printed cells, and the interval that their rounding allows.

    The function has to be monotone in each argument.
    """
    corners = product(*map(rounded_to, cells))
    return float(function(*map(float, cells))), Interval.over([float(function(*corner)) for corner in corners])


@dataclass(frozen=True)
class Row:
    """One row of a table; cells are text, empty where the paper prints nothing."""

    table: Table
    cells: Mapping[str, str]

    @property
    def label(self) -> str:
        """Key cells of the row, which identify it within its table."""
        return ", ".join(self.cells[key] for key in self.table.keys if self.cells[key])

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def number(self, column: str) -> float:
        return float(self.cells[column])

    def interval(self, column: str) -> Interval:
        """Numbers that round to the printed cell."""
        return rounded_to(self.cells[column])

    def place(self, column: str | None = None) -> str:
        """Reference to the row or to its cell in this column: "table: row: column"."""
        return f"{self.table.name}: {self.label}" + (f": {column}" if column else "")


@dataclass(frozen=True)
class Table:
    """One table of a paper.

    place : where the paper has it. keys : columns that identify a row. units : units of the other columns
    """

    name: str
    paper: str
    place: str
    caption: str
    keys: tuple[str, ...]
    units: Mapping[str, str]
    lines: tuple[Mapping[str, str], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.keys, *self.units)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(Row(self, line) for line in self.lines)

    def row(self, *keys: str) -> Row:
        """The row whose key columns begin with these values."""
        matches = [row for row in self.rows if tuple(row[key] for key in self.keys[: len(keys)]) == keys]
        if len(matches) != 1:
            raise InputError(f"{len(matches)} rows of table {self.name} match {', '.join(keys)}; give {self.keys}")
        return matches[0]


@cache
def _descriptions() -> dict[str, dict[str, Any]]:
    return tomllib.loads((DATA / "tables.toml").read_text(encoding="utf-8"))


def table_names() -> tuple[str, ...]:
    """Names of all tables, in the order of the papers."""
    return tuple(_descriptions())


@cache
def read_table(name: str) -> Table:
    """Table of a paper; InputError for an unknown name and for a file that was edited since its transcription."""
    if name not in _descriptions():
        raise InputError(f"unknown table {name}; choose one of {', '.join(table_names())}")
    description = dict(_descriptions()[name])
    text = (DATA / f"{name}.csv").read_text(encoding="utf-8")
    if digest(text, length=8) != description.pop("digest"):
        raise InputError(
            f"table {name} differs from its transcription; `git diff {DATA.name}/{name}.csv` in studies/papers shows "
            "the cells, `git checkout` restores them"
        )
    keys, lines = tuple(description.pop("keys")), tuple(csv.DictReader(text.splitlines()))
    return Table(name=name, keys=keys, lines=lines, **description)


def stated(paper: str, name: str) -> Row:
    """Figure that a paper states in its text, with columns `value` and `where`."""
    return read_table(f"{paper}_stated").row(name)
