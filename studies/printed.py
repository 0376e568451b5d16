"""The figures that a report's tables print, each by a name: what claims of a study are stated and checked against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

LADDER = "speedup of"  # of the tables that hold the same speedups as the main ones
NUMBERED = {LADDER, "layers below", "N", "E", "PCT's width", "nodes"}  # columns whose cells say too little alone
# Columns that say what a line is of; with the section and the column they name a figure.
KEYS = NUMBERED | {
    "run",
    "D",
    "drafter",
    "policy",
    "question (difference of speedups, paired)",
    "prompts",
    "spread",
    "draft model",
    "T",
    "fitted",
    "trace",
    "costs",
    "context",
    "batch",
    "arm",
    "epsilon",
    "score",
    "form",
    "variant",
    "head",
    "trained",
    "tuned by",
    "learning rate",
    "question",
    "against",
    "domain",
    "tree",
    "probability of a node, given its parent",
}
# Columns of words, such as a policy's settings or an order.
WORDS = {"predicted best", "fixed K", "Thompson sampling", "order", "order, AdaEDL's table 1 (as in 8 of its 9 cells)"}
DIGITS = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
NUMBER = re.compile(rf"(?<![\w.])({DIGITS})(?: \[({DIGITS}), ({DIGITS})\])?")


@dataclass(frozen=True)
class Figure:
    """A number of a report's table.

    section : the headings above the table, the report's own left out, and its caption where those do not tell it from
        another
    row : the line's cells by column
    number : which of the cell's numbers, from 1
    several : whether the cell has more of them
    text, ends : the number and the ends of its interval, as printed
    """

    section: str
    row: Mapping[str, str]
    column: str
    number: int
    several: bool
    text: str
    ends: tuple[str, str] | None

    @property
    def keys(self) -> list[str]:
        keys = {column: cell for column, cell in self.row.items() if is_key(column, self.row)}
        return [f"{column} {cell}" if column in NUMBERED else cell for column, cell in keys.items()]

    @cached_property
    def name(self) -> str:
        which = f", number {self.number}" if self.several else ""
        return f"{self.section}: {', '.join(self.keys)}: {self.column}{which}".replace("`", "")

    @property
    def value(self) -> float:
        return _value(self.text)

    @property
    def interval(self) -> list[float] | None:
        return None if self.ends is None else [_value(end) for end in self.ends]

    @property
    def tolerance(self) -> float:
        """Half a unit of the last digit."""
        return 0.5 * 10.0 ** -len(self.text.partition(".")[2])


def is_key(column: str, row: Mapping[str, str]) -> bool:
    """Whether this column says what the line is of; verification does beside its epsilon, else it is a time."""
    return column in KEYS or (column == "verification" and "epsilon" in row)


def _value(text: str) -> float:
    return float(text.replace(",", ""))


@dataclass(frozen=True)
class Table:
    """A table's lines by column, with the headings that it stands under and the line above it that ends in a colon."""

    section: str
    caption: str
    rows: list[dict[str, str]]

    def figures(self, section: str) -> Iterator[Figure]:
        for row in self.rows:
            for column, cell in row.items():
                if is_key(column, row) or column in WORDS:
                    continue
                numbers = list(NUMBER.finditer(cell))
                for number, match in enumerate(numbers, start=1):
                    text, *ends = match.groups()
                    both = None if ends[0] is None else (ends[0], ends[1])
                    yield Figure(section, row, column, number, len(numbers) > 1, text, both)


def figures_of(report: Path) -> dict[str, Figure]:
    """The figures of all tables of a report in Markdown, by name, in their order."""
    found: dict[str, Figure] = {}
    tables = list(_tables(report.read_text().splitlines()))
    for table, section in zip(tables, _sections(tables), strict=True):
        for figure in table.figures(section):
            assert figure.name not in found, f"{report}: two figures are called {figure.name!r}"
            found[figure.name] = figure
    return found


def _sections(tables: list[Table]) -> Iterator[str]:
    """Of each table what its figures stand under: its headings, and its caption if figures of another are called alike.

    A caption that its section says more than once stands under the last one that it says only once.
    """
    own = [{figure.name for figure in table.figures(table.section)} for table in tables]
    tables_with = Counter(name for names in own for name in names)
    said = Counter((table.section, table.caption) for table in tables)
    introduced: dict[str, str] = {}
    for table, names in zip(tables, own, strict=True):
        captions = [introduced.get(table.section, ""), table.caption]
        if said[table.section, table.caption] == 1:
            introduced[table.section], captions = table.caption, [table.caption]
        alike = any(tables_with[name] > 1 for name in names)
        yield " / ".join(filter(None, [table.section, *captions] if alike else [table.section]))


def _tables(lines: list[str]) -> Iterator[Table]:
    headings: dict[int, str] = {}
    above = ""
    for is_table, block in groupby(lines, key=lambda line: line.startswith("|")):
        if is_table:
            names, _, *body = block
            columns, section = _columns(names), " / ".join(text for level, text in headings.items() if level > 1)
            rows = [dict(zip(columns, _cells(line), strict=True)) for line in body]
            yield Table(section, above.removesuffix(":") if above.endswith(":") else "", rows)
            continue
        for line in filter(None, block):
            above = line
            if line.startswith("#"):
                marks, _, title = line.partition(" ")
                headings = {level: text for level, text in headings.items() if level < len(marks)} | {len(marks): title}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _columns(line: str) -> list[str]:
    """The names of a table's columns; one that repeats is told from the others by the column before it."""
    names = _cells(line)
    return [f"{name}, {names[at - 1]}" if names.count(name) > 1 else name for at, name in enumerate(names)]
