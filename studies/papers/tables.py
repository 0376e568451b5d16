"""The papers' tables as printed, cells as the intervals that round to them, and digests that name a changed cell."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from specsim.errors import InputError
from specsim.files import nested_digest

DATA = Path(__file__).parent / "data"
PAPERS = {  # key: title, arXiv id where there is one
    "eesd": ("EESD, speculative decoding via early exiting with Thompson sampling control", "2406.03853"),
    "edd": ("EDD + PCT, effective draft decoder with pruned candidate tree", ""),
    "space": ("SPACE, smart parallel auto-correct decoding", "2402.11809"),
    "adaedl": ("AdaEDL, early draft stopping by entropy", "2410.18351"),
    "medusa": ("MEDUSA, multiple decoding heads", "2401.10774"),
}
DIGEST_LENGTH = 8  # hex digits; of a row or column
SLACK = 1e-9  # of decimals that are no binary fractions


class Interval(NamedTuple):
    """All numbers from low to high."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """From the least of these to the largest."""
        return cls(min(values), max(values))

    def meets(self, other: Interval) -> bool:
        return self.low <= other.high + SLACK and other.low <= self.high + SLACK


def rounded_to(text: str) -> Interval:
    """What rounds to a printed decimal: half a unit of its last digit to both sides."""
    digits = len(text.partition(".")[2])
    half = 0.5 * 10.0**-digits
    return Interval(float(text) - half, float(text) + half)


def image(function: Callable[..., float], *intervals: Interval) -> Interval:
    """What a function makes of all values inside, if it is monotone in each argument."""
    return Interval.over([float(function(*corner)) for corner in product(*intervals)])


@dataclass(frozen=True)
class Row:
    """One line of a table; cells are text, empty where the paper has none."""

    table: Table
    cells: Mapping[str, str]

    @property
    def label(self) -> str:
        """What names the row within its table."""
        return ", ".join(self.cells[key] for key in self.table.keys if self.cells[key])

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def number(self, column: str) -> float:
        return float(self.cells[column])

    def interval(self, column: str) -> Interval:
        """What rounds to the printed cell."""
        return rounded_to(self.cells[column])

    def place(self, column: str | None = None) -> str:
        """The row, or its cell in this column, by table, row and column."""
        return f"{self.table.name}: {self.label}" + (f": {column}" if column else "")


@dataclass(frozen=True)
class Table:
    """One table of a paper.

    place : in the paper. keys : columns that name a row. units : of the other columns
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

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(Row(self, line) for line in self.lines)

    def row(self, *keys: str) -> Row:
        """The row whose key columns begin with these."""
        found = [row for row in self.rows if tuple(row[key] for key in self.keys[: len(keys)]) == keys]
        if len(found) != 1:
            raise InputError(f"table {self.name} has {len(found)} rows {', '.join(keys)}; name one by {self.keys}")
        return found[0]

    def digests(self) -> dict[str, dict[str, str]]:
        """A digest of every row and of every column."""
        rows = {row.label: _digest(row[column] for column in self.columns) for row in self.rows}
        columns = {column: _digest(row[column] for row in self.rows) for column in self.columns}
        return {"rows": rows, "columns": columns}


def _digest(cells: Any) -> str:
    return nested_digest(*cells)[:DIGEST_LENGTH]


@cache
def _described() -> dict[str, dict[str, Any]]:
    return tomllib.loads((DATA / "tables.toml").read_text(encoding="utf-8"))


def table_names() -> tuple[str, ...]:
    """The names of all tables, in the papers' order."""
    return tuple(_described())


@cache
def read_table(name: str) -> Table:
    """A table of a paper; InputError for a name that none has, and for cells that are not those transcribed."""
    if name not in _described():
        raise InputError(f"there is no table {name}; choose of {', '.join(table_names())}")
    table = parse_table(name, (DATA / f"{name}.csv").read_text(encoding="utf-8"))
    if changed := changed_cells(table):
        raise InputError(f"{'; '.join(changed)}: not as transcribed from the paper; check out the file anew")
    return table


def parse_table(name: str, text: str) -> Table:
    """A table of its file's text, its cells unchecked."""
    described = _described()[name]
    lines = tuple(csv.DictReader(text.splitlines()))
    table = Table(
        name=name,
        paper=described["paper"],
        place=described["place"],
        caption=described["caption"],
        keys=tuple(described["keys"]),
        units=described["units"],
        lines=lines,
    )
    if not lines or set(lines[0]) != set(table.columns) or any(None in line.values() for line in lines):
        raise InputError(f"table {name} has not the columns {', '.join(table.columns)}; check out the file anew")
    return table


@cache
def _transcribed() -> dict[str, Any]:
    """What `Table.digests` said of every table when it was transcribed."""
    return dict(json.loads((DATA / "digests.json").read_text(encoding="utf-8")))


def changed_cells(table: Table) -> list[str]:
    """The cells that are not those transcribed, by table, row and column; rows that were added or are missing."""
    expected = _transcribed()[table.name]
    found = table.digests()
    gone = [f"table {table.name}, row {row} is missing" for row in expected["rows"] if row not in found["rows"]]
    new = [f"table {table.name}, row {row} is new" for row in found["rows"] if row not in expected["rows"]]
    rows = [row for row in found["rows"] if found["rows"][row] != expected["rows"].get(row)]
    columns = [name for name in found["columns"] if found["columns"][name] != expected["columns"][name]]
    return gone + new or [f"table {table.name}, row {row}, column {column}" for row in rows for column in columns]


def stated(paper: str, name: str) -> Row:
    """A figure of a paper's text, with its `value` and `where` it stands."""
    return read_table(f"{paper}_stated").row(name)
