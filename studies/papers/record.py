"""Findings of the audit: figures recomputed from printed figures, with a verdict on the paper."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from studies.papers.tables import Interval

Verdict = Literal["supports", "contradicts", "cannot decide"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
FIELD = re.compile(r"{([\w.]+):(?:(low|high):)?([^}]+)}")


@dataclass(frozen=True)
class Finding:
    """Figure recomputed from a paper's tables.

    name : paper.figure, or paper.figure.row for a member of a series. Names do not change
    paper : key of `studies.papers.tables.PAPERS`
    tables : tables, rows and cells that the figure is computed from, "table: row: column"
    value : the figure
    unit : its unit; "" for plain numbers and shares
    low, high : interval that the rounding of the printed cells allows, range over rows, or 95 % interval of a
        simulation; `text` says which if it is either of the last two
    verdict : whether the figure agrees with what the paper prints
    text : one sentence
    erratum : case of docs/errata.md that explains it, such as "A15"; "" for none
    """

    name: str
    paper: str
    tables: tuple[str, ...]
    value: float
    unit: str
    low: float | None
    high: float | None
    verdict: Verdict
    text: str
    erratum: str

    @property
    def series(self) -> str:
        """Name of its series; its own name if it is in none."""
        return ".".join(self.name.split(".")[:2])


def finding(
    name: str,
    value: float | np.floating[Any],
    unit: str,
    verdict: Verdict | bool,
    text: str,
    *tables: str,
    within: Interval | None = None,
    erratum: str = "",
    flaw: str = "",
) -> Finding:
    """Create a finding; `verdict` may be a bool, and `flaw` is the erratum if the verdict is not "supports"."""
    if isinstance(verdict, bool | np.bool_):
        verdict = "supports" if verdict else "contradicts"
    if flaw and verdict != "supports":
        erratum = flaw
    low, high = (None, None) if within is None else (float(within.low), float(within.high))
    return Finding(name, name.partition(".")[0], tables, float(value), unit, low, high, verdict, text, erratum)


def mean_finding(
    name: str,
    values: Sequence[float],
    unit: str,
    verdict: Verdict | bool,
    text: str,
    *tables: str,
    erratum: str = "",
) -> Finding:
    """Create a finding of a mean over rows, with the range over rows as its interval."""
    text, within = f"{text}; range over rows", Interval.over(values)
    return finding(name, float(np.mean(values)), unit, verdict, text, *tables, within=within, erratum=erratum)


def slug(*words: str) -> str:
    """End of a finding's name: ("Vicuna1.5-7B", "EAGLE-2") gives vicuna1_5_7b.eagle_2."""
    return ".".join(re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_") for word in words if word)


def filled(text: str, findings: Iterable[Finding]) -> str:
    """Return the text with {name:format} replaced by a finding's figure, {name:low:format} by an interval's end."""
    by_name = {finding.name: finding for finding in findings}
    return FIELD.sub(lambda field: format(getattr(by_name[field[1]], field[2] or "value"), field[3]), text)
