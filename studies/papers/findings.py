"""Figures that were recomputed from the papers' printed ones, with a verdict on the paper: data/findings.json.

series : for each series of figures the range of their values, and how many of them have each verdict
findings : by name, the figures that pages name and those that section F of docs/errata.md lists
use : for each case of section F, which figure to use
predictions : for each cost model and printed row, the speedup that the model predicts for it
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from studies.papers.tables import DATA

VERDICTS = ("supports", "contradicts", "cannot decide")
FIELD = re.compile(r"{([\w.]+):(?:(low|high):)?([^}]+)}")


@cache
def audit() -> dict[str, Any]:
    """Read data/findings.json."""
    return dict(json.loads((DATA / "findings.json").read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """Return the text with {name:format} replaced by a finding's figure, {name:low:format} by an interval's end."""
    findings = audit()["findings"]
    return FIELD.sub(lambda field: format(findings[field[1]][field[2] or "value"], field[3]), text)
