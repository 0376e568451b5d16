"""Columns of tables, rendered to the terminal, HTML, CSV and Markdown.

A row is a mapping, such as a row of a leaderboard's document. A value that the row lacks is an empty cell, so that a
baseline is a row of the few values that it has.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specsim.replaying.intervals import Estimate
from specsim.report.page import macros, percent, signed_percent, with_interval

Row = Mapping[str, Any]
DASH = "\u2013"  # an empty cell of a page
PAGE, TERMINAL = "page", "terminal"


class Format(NamedTuple):
    """Format of a value, as plain text and on a page, which escapes text that page.html did not render."""

    text: Callable[[Any], str]
    html: Callable[[Any], str]


def plain(text: Callable[[Any], str]) -> Format:
    """The same text everywhere."""
    return Format(text, text)


def as_number(value: Any) -> float:
    """Return a number as it is, and the JSON form of an estimate as an estimate."""
    return Estimate(**value) if isinstance(value, Mapping) else value


def _speedup(value: Any) -> str:
    value = as_number(value)
    return str(value) if isinstance(value, Estimate) else f"{value:.3f}"


def _speedup_html(value: Any) -> str:
    value = as_number(value)
    return with_interval(value) if isinstance(value, Estimate) else f"{value:.3f}"


TEXT = plain(str)
TWO, THREE = plain(lambda value: f"{value:.2f}"), plain(lambda value: f"{value:.3f}")
SPEEDUP = Format(_speedup, _speedup_html)  # with its interval, if any
DIFFERENCE = Format(lambda value: f"{as_number(value):.3f}", _speedup_html)  # of two speedups
ERROR = Format(lambda value: f"{value:+.1f}", signed_percent)  # percent
SHARE = plain(lambda value: f"{100 * value:.1f} %")
# Of rounds or outputs, percent; None where a real run draws its own text.
IDENTICAL = Format(lambda value: "n.a." if value is None else f"{value:.2f}", percent)


class Colored(NamedTuple):
    """A column's heading on a page that begins in the color of predictions ("p") or of measurements ("m")."""

    color: str
    text: str
    rest: str = ""


class Column(NamedTuple):
    """A column of a table.

    title : in plain text
    value : key of the value in a row, or a function of the row; None for the row itself
    form : how the value is written
    heading : the title on a page where it says more; lines of text
    only : PAGE or TERMINAL where the column is left out elsewhere
    """

    title: str
    value: str | Callable[[Row], Any] | None
    form: Format = TEXT
    heading: str | Colored = ""
    only: str = ""

    def cell(self, row: Row, empty: str, *, html: bool) -> str:
        if isinstance(self.value, str):
            if self.value not in row:
                return empty
            value = row[self.value]
        else:
            value = row if self.value is None else self.value(row)
            if value is None:
                return empty
        return self.form.html(value) if html else self.form.text(value)


def as_text(columns: Sequence[Column], rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells in plain text, for `print_table` and `markdown_table`."""
    shown = [column for column in columns if column.only != PAGE]
    return [column.title for column in shown], [[column.cell(row, "", html=False) for column in shown] for row in rows]


def as_html(kind: str, columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Render the table as HTML. kind : its class; a row's own class is its value "row_class"."""
    shown = [column for column in columns if column.only != TERMINAL]
    lines = [(row.get("row_class", ""), [c.cell(row, DASH, html=True) for c in shown]) for row in rows]
    return macros().table(kind, [column.heading or column.title for column in shown], lines)


def as_csv(names: Sequence[str], rows: Iterable[Row]) -> str:
    """One line per row; an estimate under `name` fills the columns name, name_low and name_high."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        flat = dict(row)
        for name, value in row.items():
            if isinstance(value, Estimate) or (isinstance(value, Mapping) and "estimate" in value):
                estimate = value.as_dict() if isinstance(value, Estimate) else value
                flat |= {name: estimate["estimate"], f"{name}_low": estimate["low"], f"{name}_high": estimate["high"]}
        writer.writerow(flat)
    return text.getvalue()


def ranked(rows: Sequence[Row], baseline: Row, speedup: str) -> list[Row]:
    """The rows, best first, with their places and the baseline at its own: rows below it made decoding slower.

    speedup : key of the estimate that the rows are ordered by
    """
    placed = [{**row, "place": str(at), "row_class": "best" if at == 1 else ""} for at, row in enumerate(rows, 1)]
    ahead = sum(as_number(row[speedup]) >= 1 for row in rows)
    between = {**baseline, "place": "", "row_class": "baseline"}
    return [*placed[:ahead], between, *placed[ahead:]]


def behind_leader(row: Row) -> Any:
    """The leader's speedup less the row's; None for the leader and for what is not compared."""
    behind = row.get("leader_minus_this")
    return None if behind is None else behind.difference
