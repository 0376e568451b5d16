"""All findings, paper by paper, and their recorded verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from specsim.io.errors import InputError
from studies.papers import adaedl, edd, medusa, space
from studies.papers.eesd import algorithm, arithmetic, control, cost
from studies.papers.record import Finding
from studies.papers.tables import DATA

AUDITS: dict[str, tuple[Callable[[], Iterator[Finding]], ...]] = {
    "eesd": (arithmetic.audit, cost.audit, control.audit, algorithm.audit),
    "edd": (edd.audit,),
    "space": (space.audit,),
    "adaedl": (adaedl.audit,),
    "medusa": (medusa.audit,),
}
RECORDED = DATA / "verdicts.json"
Verdicts = dict[str, dict[str, Any]]


@cache
def findings_of(paper: str) -> tuple[Finding, ...]:
    """Findings on one paper; InputError for an unknown paper."""
    if paper not in AUDITS:
        raise InputError(f"unknown paper {paper}; choose one of {', '.join(AUDITS)}")
    return tuple(finding for audit in AUDITS[paper] for finding in audit())


def findings() -> tuple[Finding, ...]:
    """Findings on all five papers, recomputed from the transcribed tables.

    Raises InputError if a table was edited since its transcription.

    >>> from studies.papers.audit import findings
    >>> by_name = {finding.name: finding for finding in findings()}
    >>> round(by_name["eesd.eq14_one_ratio_error"].value, 2)
    1.75
    """
    return tuple(finding for paper in AUDITS for finding in findings_of(paper))


def verdicts_of(findings: Sequence[Finding]) -> Verdicts:
    """Number of findings by series, and names of those that do not support the paper."""
    verdicts: Verdicts = {}
    for finding in findings:
        series = verdicts.setdefault(finding.series, {"findings": 0})
        series["findings"] += 1
        if finding.verdict != "supports":
            series.setdefault(finding.verdict, []).append(finding.name)
    return verdicts


def recorded_verdicts() -> Verdicts:
    """Recorded result of `verdicts_of` for all findings."""
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


def changed_verdicts(findings: Sequence[Finding]) -> list[str]:
    """Differences from the recorded verdicts of these findings' papers, a line each."""
    papers = {finding.paper for finding in findings}
    recorded = {name: entry for name, entry in recorded_verdicts().items() if name.partition(".")[0] in papers}
    current, lines = verdicts_of(findings), []
    for series in {**recorded, **current}:
        old, new = recorded.get(series, {}), current.get(series, {})
        if old.get("findings", 0) != new.get("findings", 0):
            lines.append(f"{series}: {new.get('findings', 0)} findings, recorded {old.get('findings', 0)}")
        for verdict in ("contradicts", "cannot decide"):
            before, after = (set(entry.get(verdict, ())) for entry in (old, new))
            lines += [f"{name}: no longer {verdict!r}" for name in sorted(before - after)]
            lines += [f"{name}: now {verdict!r}" for name in sorted(after - before)]
    return lines
