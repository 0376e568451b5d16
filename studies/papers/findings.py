"""Figures that were recomputed from the papers' printed ones, with a verdict on the paper: data/findings.json."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import NamedTuple

from studies.papers.tables import DATA

VERDICTS = ("supports", "contradicts", "cannot decide")
FIELD = re.compile(r"{([\w.]+):(?:(low|high):)?([^}]+)}")


class Finding(NamedTuple):
    """A recomputed figure. erratum : its case in docs/errata.md, or empty; low, high : its interval, if it has one"""

    value: float
    unit: str
    verdict: str
    erratum: str
    cell: str
    text: str
    low: float | None = None
    high: float | None = None


class Audit(NamedTuple):
    """Contents of data/findings.json.

    series : for each series of figures the range of their values, and how many of them have each verdict
    findings : by name, the figures that pages name and those that section F of docs/errata.md lists
    use : for each case of section F, which figure to use
    predictions : for each cost model and printed row, the speedup that the model predicts for it
    """

    series: list[dict[str, str | float]]
    findings: dict[str, Finding]
    use: dict[str, str]
    predictions: dict[str, dict[str, float]]


@cache
def audit() -> Audit:
    """Read data/findings.json."""
    document = json.loads((DATA / "findings.json").read_text(encoding="utf-8"))
    findings = {name: Finding(**finding) for name, finding in document["findings"].items()}
    return Audit(**{**document, "findings": findings})


def filled(text: str) -> str:
    """Return the text with {name:format} replaced by a finding's figure, {name:low:format} by an interval's end."""
    findings = audit().findings
    return FIELD.sub(lambda field: format(getattr(findings[field[1]], field[2] or "value"), field[3]), text)
