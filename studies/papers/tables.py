"""Tables of the five papers as printed."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from specsim.io.errors import InputError
from specsim.io.files import digest

DATA = Path(__file__).parent / "data"
PAPERS = {  # titles
    "eesd": "EESD, speculative decoding via early exiting with Thompson sampling control",
    "edd": "EDD + PCT, effective draft decoder with pruned candidate tree",
    "space": "SPACE, smart parallel auto-correct decoding",
    "adaedl": "AdaEDL, early draft stopping by entropy",
    "medusa": "MEDUSA, multiple decoding heads",
}


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

    def place(self) -> str:
        """Reference to the row: "table: row"."""
        return f"{self.table.name}: {self.label}"


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
def _read_descriptions() -> dict[str, dict[str, Any]]:
    return tomllib.loads((DATA / "tables.toml").read_text(encoding="utf-8"))


@cache
def hyperparameters(paper: str) -> dict[tuple[str, str], str]:
    """Read what a paper states of its settings: printed values, as text, by system and name; no unstated ones."""
    with (DATA / "hyperparameters.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["paper"] == paper and row["stated"] == "yes"]
    return {(row["system"], row["name"]): row["value"] for row in rows}


def table_names() -> tuple[str, ...]:
    """Names of all tables, in the order of the papers."""
    return tuple(_read_descriptions())


@cache
def read_table(name: str) -> Table:
    """Table of a paper; InputError for an unknown name and for a file that was edited since its transcription."""
    if name not in _read_descriptions():
        raise InputError(f"unknown table {name}; choose one of {', '.join(table_names())}")
    description = dict(_read_descriptions()[name])
    text = (DATA / f"{name}.csv").read_text(encoding="utf-8")
    if digest(text, length=8) != description.pop("digest"):
        raise InputError(
            f"table {name} differs from its transcription; `git diff {DATA.name}/{name}.csv` in studies/papers shows "
            "the cells, `git checkout` restores them"
        )
    keys, lines = tuple(description.pop("keys")), tuple(csv.DictReader(text.splitlines()))
    return Table(name=name, keys=keys, lines=lines, **description)
