"""All findings, paper by paper, and the verdicts that were recorded of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from specsim.errors import InputError
from studies.papers import adaedl, edd, eesd, eesd_algorithm, eesd_control, eesd_cost, medusa, space
from studies.papers.record import Finding
from studies.papers.tables import DATA

AUDITS: dict[str, tuple[Callable[[], Iterator[Finding]], ...]] = {
    "eesd": (eesd.audit, eesd_cost.audit, eesd_control.audit, eesd_algorithm.audit),
    "edd": (edd.audit,),
    "space": (space.audit,),
    "adaedl": (adaedl.audit,),
    "medusa": (medusa.audit,),
}
RECORDED = DATA / "verdicts.json"


@cache
def findings_of(paper: str) -> tuple[Finding, ...]:
    """The findings of one paper; InputError for a paper that is not there."""
    if paper not in AUDITS:
        raise InputError(f"there is no paper {paper}; choose of {', '.join(AUDITS)}")
    return tuple(one for audit in AUDITS[paper] for one in audit())


def findings() -> tuple[Finding, ...]:
    """All findings on the five papers' tables, recomputed from the cells that ship with specsim.

    Returns
    -------
    tuple of Finding, paper by paper

    Raises
    ------
    InputError
        If a shipped cell is not as it was transcribed; the message names table, row and column.

    Examples
    --------
    >>> from studies.papers.audit import finding
    >>> round(finding("eesd.eq14_one_ratio_error").value, 2)
    1.75
    """
    return tuple(one for paper in AUDITS for one in findings_of(paper))


def finding(name: str) -> Finding:
    """One finding by its name; only its paper is audited.

    Parameters
    ----------
    name : str
        As `python -m studies.papers audit --json` lists it, for example "eesd.eq14_one_ratio_error".

    Raises
    ------
    InputError
        If there is none of this name.
    """
    for one in findings_of(name.partition(".")[0]):
        if one.name == name:
            return one
    raise InputError(f"there is no finding {name}; `python -m studies.papers audit --json` lists them")


def verdicts_of(found: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """By series: how many findings it has, and which of them do not support the paper."""
    document: dict[str, dict[str, Any]] = {}
    for one in found:
        series = document.setdefault(one.series, {"findings": 0})
        series["findings"] += 1
        if one.verdict != "supports":
            series.setdefault(one.verdict, []).append(one.name)
    return document


def recorded_verdicts() -> dict[str, dict[str, Any]]:
    """What `verdicts_of` said of all findings when they were last looked at."""
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


def changed_verdicts(found: Sequence[Finding]) -> list[str]:
    """What differs from the recorded verdicts, a line each, over the papers of these findings."""
    papers = {one.paper for one in found}
    now, lines = verdicts_of(found), []
    recorded = {name: entry for name, entry in recorded_verdicts().items() if name.partition(".")[0] in papers}
    for series in {**recorded, **now}:
        was, is_now = recorded.get(series, {}), now.get(series, {})
        if was.get("findings", 0) != is_now.get("findings", 0):
            lines.append(f"{series}: {is_now.get('findings', 0)} findings, recorded {was.get('findings', 0)}")
        for verdict in ("contradicts", "cannot decide"):
            before, after = (set(entry.get(verdict, ())) for entry in (was, is_now))
            lines += [f"{name}: no longer {verdict!r}" for name in sorted(before - after)]
            lines += [f"{name}: now {verdict!r}" for name in sorted(after - before)]
    return lines
