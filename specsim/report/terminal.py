"""Tables that fit the terminal: wide tables continue in further blocks that repeat their first columns."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from specsim.io.printable import printable, unescaped

LOG_WIDTH = 200  # of a pipe or a file, which has no edge
UNBROKEN = 24  # characters of the longest cell that is not broken at spaces: an interval has 20 or so
BORDER = 3  # characters beside the cells of each column; the table has 1 more
NUMBER = re.compile(r"[-+\u2212]?\d[\d,.]*(?:[eE][-+]?\d+)?( %| ?x|, [-+\d].*| [(\[].*)?")  # with unit or interval


class Need(NamedTuple):
    """Characters that a column needs so that no word is broken, no short cell either, and nothing at all."""

    word: int
    least: int
    whole: int


def terminal() -> Console:
    """Standard output, which prints texts without markup. $COLUMNS is obeyed off a terminal, too.

    Its own styles are not escaped, so that a text from a file has to be `printable` before.
    """
    out = unescaped(sys.stdout)
    bounded = Console(file=out).is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return Console(file=out, markup=False, emoji=False, highlight=False, width=None if bounded else LOG_WIDTH)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, labels: int = 1) -> None:
    """Print a table; columns of numbers are right-aligned, others left-aligned.

    labels : number of first columns that name the row
    """
    console, lines = terminal(), [[printable(cell) for _, cell in zip(columns, row, strict=True)] for row in rows]
    columns = list(map(printable, columns))
    console.print(printable(title), style="italic")
    needs = [need(column, [line[at] for line in lines]) for at, column in enumerate(columns)]
    for block in blocks(needs, labels, console.width):
        table = Table()
        for at, width in zip(block, widths([needs[at] for at in block], console.width), strict=True):
            numbers = at > 0 and all(NUMBER.fullmatch(line[at]) for line in lines if line[at])
            table.add_column(columns[at], justify="right" if numbers else "left", overflow="fold", width=width)
        for line in lines:
            table.add_row(*(line[at] for at in block))
        console.print(table)


def need(heading: str, cells: Sequence[str]) -> Need:
    """Compute the widths that a column needs; its heading and long cells may break at spaces."""
    word = max((len(word) for text in (heading, *cells) for word in text.split()), default=1)
    longest = max(map(len, cells), default=0)
    least = max(word, min(longest, UNBROKEN))
    return Need(word, least, max(least, longest, len(heading)))


def blocks(needs: Sequence[Need], labels: int, width: int) -> list[list[int]]:
    """The columns of every block: the labels, and as many others as fit beside them, at least 1."""
    first = list(range(min(labels, len(needs))))
    complete, block = [], first
    for at in range(len(first), len(needs)):
        fits = 1 + sum(needs[column].least + BORDER for column in (*block, at)) <= width
        if block != first and not fits:
            complete.append(block)
            block = first
        block = [*block, at]
    return [*complete, block]


def widths(needs: Sequence[Need], width: int) -> list[int]:
    """Characters of each column: the least that it needs, and what is left over to the narrowest that lack some.

    Where even the least does not fit, the widest give way: those with spaces first, then words are broken.
    """
    sizes = [column.least for column in needs]
    left = width - 1 - sum(sizes) - BORDER * len(sizes)
    while left > 0 and (lacking := [at for at, column in enumerate(needs) if sizes[at] < column.whole]):
        sizes[min(lacking, key=sizes.__getitem__)] += 1
        left -= 1
    while left < 0 and max(sizes) > 1:
        loose = [at for at, column in enumerate(needs) if sizes[at] > column.word]
        sizes[max(loose or range(len(sizes)), key=sizes.__getitem__)] -= 1
        left += 1
    return sizes
