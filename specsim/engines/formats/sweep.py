"""A table of a sweep: a row for every K, with its acceptance length or rate, and what was measured at it."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Counters
from specsim.engines.formats.reading import log_lines
from specsim.engines.formats.records import ImportedRecords, Setup, Skipped
from specsim.engines.rates import ASSUMED_ROUNDS
from specsim.io.errors import InputError

INVALID = "give a table with a header, such as: K, batch, tok/s, accept length"
MOST_ROWS = 10_000
# What people call a column, in small letters without spaces and signs.
COLUMNS = {
    "k": {"k", "numspeculativetokens", "speculativetokens", "spectokens", "numspectokens", "nmax", "draftmax", "steps"},
    "batch": {"batch", "batchsize", "bs", "concurrency", "maxconcurrency", "requests"},
    "speed": {"toks", "tokss", "tokenss", "ts", "tps", "tokenspersecond", "throughput", "outputthroughput"},
    "tpot": {"tpot", "tpotms", "meantpotms", "itl", "itlms"},
    "length": {"acceptlength", "acceptlen", "acceptancelength", "meanacceptancelength", "tau", "al", "meanlen"},
    "rate": {"acceptrate", "acceptancerate", "rate"},
    "either": {"accept", "accepted", "acceptance", "acc"},  # a length if above 1 and not in percent, else a rate
}


class Row(NamedTuple):
    """A row of the table: one measurement of a server.

    k, batch : draft length and number of requests
    speed : output tokens per second of all requests; 1 / TPOT in a table without throughput, as only ratios count
    length : acceptance length, the token that the target adds included
    tpot_ms : milliseconds per output token of a request; batch / speed where the table does not have it
    """

    k: int
    batch: int
    speed: float | None
    length: float | None
    tpot_ms: float | None = None


def names_of(header: str) -> list[str | None]:
    """The columns of `COLUMNS` that a header names, by its cells."""
    cells = [re.sub(r"[^a-z]", "", cell.lower()) for cell in _cells(header)]
    return [next((name for name, words in COLUMNS.items() if cell in words), None) for cell in cells]


def is_header(line: str) -> bool:
    """Whether a line is a header of such a table."""
    names = names_of(line)
    return "k" in names and len({"speed", "tpot", "length", "rate", "either"} & set(names)) > 0


def _cells(line: str) -> list[str]:
    line = line.strip().strip("|")
    separator = next((mark for mark in ("|", "\t", ";", ",") if mark in line), ",")
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator), [])]


def read_rows(paths: Sequence[Path], skipped: Skipped) -> list[Row]:
    """Read the rows of tables, as CSV or in Markdown; InputError if there is none."""
    rows: list[Row] = []
    for path in paths:
        names: list[str | None] = []
        for number, line in enumerate(log_lines([path], skipped), start=1):
            if not names:
                names = names_of(line) if is_header(line) else []
            elif line.strip() and not set(line.strip()) <= set("|-: "):
                cells = {name: cell for name, cell in zip(names, _cells(line), strict=False) if name}
                rows.append(_row(cells, f"{path}, line {number}"))
                if len(rows) > MOST_ROWS:
                    raise InputError(f"{path} has more than {MOST_ROWS:,} rows; {INVALID}")
    if not rows:
        raise InputError(f"{paths[0]} has no row of a sweep; {INVALID}")
    return rows


def read_sweep(paths: Sequence[Path]) -> ImportedRecords:
    """Read a table, as CSV or in Markdown."""
    skipped = Skipped()
    rows = read_rows(paths, skipped)
    notes = _fastest(rows)
    lengths = {
        k: float(np.mean([row.length for row in rows if row.k == k and row.length]))
        for k in sorted({row.k for row in rows if row.k and row.length})
    }
    if not lengths:
        raise InputError(f"{paths[0]} has no acceptance length or rate of a K; {'; '.join(notes) or INVALID}")
    between = [(before + 1, k - 1) for before, k in itertools.pairwise((0, *lengths)) if k > before + 1]
    if between:
        missing = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in between)
        notes.append(f"filled in: K = {missing}, by a single rate of acceptance between two K of the table")
    batches = {row.batch for row in rows}
    return ImportedRecords(
        _counters(lengths),
        "benchmark",
        "accept length = output tokens of a round, the target's own included",
        notes=(*notes, f"the table tells no number of rounds: intervals are those of {ASSUMED_ROUNDS:,} rounds"),
        skipped=skipped,
        setup=Setup(draft_tokens=max(lengths), running=float(min(batches)) if len(batches) == 1 else None),
    )


def _row(cells: Mapping[str, str], where: str) -> Row:
    def number(name: str) -> float | None:
        text = cells.get(name, "").strip(" x%*~")
        if not text or text in "-":
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1e9:
            raise InputError(f"{where}: {name} is {text:.30}, not a number; {INVALID}")
        return value

    k, batch, speed, tpot, length, rate, either = map(number, (*COLUMNS,))
    if k is None or k != int(k) or k > MOST_DRAFTED or (batch is not None and not 1 <= batch == int(batch)):
        raise InputError(f"{where}: K is {cells.get('k')!r:.30}, batch {cells.get('batch')!r:.30}; {INVALID}")
    percent = "%" in cells.get("rate", "") + cells.get("either", "")
    if either == 1 and k and not percent:
        raise InputError(
            f"{where}: an acceptance of 1 may be a length or a rate; call the column accept length or rate"
        )
    if either is not None and k:
        length, rate = (either, rate) if 1 <= either <= k + 1 and not percent else (length, either)
    if length is None and rate is not None and k:
        share = rate / 100 if percent or rate > 1 else rate
        length = 1 + k * share
    if length is not None and k and not 1 <= length <= k + 1:
        raise InputError(f"{where}: an acceptance length of {length:g} is impossible with K = {k:g}; give 1 to K + 1")
    tpot_ms = tpot or ((batch or 1) * 1e3 / speed if speed else None)
    if speed is None and tpot:
        speed = 1 / tpot
    return Row(int(k), int(batch or 1), speed, length, tpot_ms)


def _fastest(rows: Sequence[Row]) -> list[str]:
    """The K that was measured the fastest, by batch."""
    notes = []
    for batch in sorted({row.batch for row in rows if row.speed}):
        speeds = {row.k: row.speed for row in rows if row.batch == batch and row.speed}
        best = max(speeds, key=lambda k: speeds[k])
        text = f"batch {batch}: K = {best} was measured the fastest" if best else f"batch {batch}: K = 0 is the fastest"
        if best and speeds.get(0):
            text += f", {speeds[best] / speeds[0]:.2f} times K = 0"
        notes.append(text)
    return notes


def _counters(lengths: Mapping[int, float]) -> Counters:
    """Counters whose drafts cut at every K of the table have its length; between two K a single rate of acceptance."""
    shares: list[float] = []  # of the rounds that accept the token at a position
    before_k, before = 0, 1.0
    for k, length in lengths.items():
        steps, share = np.arange(1, k - before_k + 1), shares[-1] if shares else 1.0
        rate, high = 0.0, 1.0
        for _ in range(60):
            middle = (rate + high) / 2
            rate, high = (middle, high) if share * (middle**steps).sum() < length - before else (rate, middle)
        shares += (share * high**steps).tolist()
        before_k, before = k, max(length, before)
    return Counters(np.full(len(shares), ASSUMED_ROUNDS), np.rint(ASSUMED_ROUNDS * np.array(shares)).astype(np.int64))
