"""One finding of the audit: a figure recomputed from printed ones, and what it says of the paper."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from studies.papers.tables import Interval

Verdict = Literal["supports", "contradicts", "cannot decide"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """A figure that was recomputed from a paper's tables.

    Parameters
    ----------
    name : str
        paper.what, or paper.what.which for one of a series; stable.
    paper : str
        Key of `studies.papers.tables.PAPERS`.
    tables : tuple of str
        Tables, rows and cells that it rests on, "table: row: column".
    value : float
        The figure.
    unit : str
        Its unit; "" for plain numbers and shares.
    low, high : float or None
        What the rounding of the printed cells allows, the range over rows or the 95 % interval of a simulation;
        `text` says where it is one of the last two.
    verdict : {"supports", "contradicts", "cannot decide"}
        Whether it agrees with what the paper prints beside it.
    text : str
        One sentence.
    erratum : str
        Where docs/errata.md says more, as "A15"; "" for nowhere.
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
        """The series that it is one of; its own name where it stands alone."""
        return ".".join(self.name.split(".")[:2])


def finding(
    name: str,
    value: float,
    unit: str,
    verdict: Verdict | bool,
    text: str,
    *tables: str,
    within: Interval | None = None,
    erratum: str = "",
) -> Finding:
    """A finding; `verdict` may be whether the paper agrees."""
    said: Verdict = verdict if isinstance(verdict, str) else "supports" if verdict else "contradicts"
    low, high = (None, None) if within is None else (float(within.low), float(within.high))
    return Finding(name, name.partition(".")[0], tables, float(value), unit, low, high, said, text, erratum)


def slug(*words: str) -> str:
    """Words as the end of a name: "Vicuna1.5-7B", "EAGLE-2" is vicuna1_5_7b.eagle_2."""
    return ".".join(re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_") for word in words if word)
