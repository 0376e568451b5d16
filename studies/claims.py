"""Claims over what the studies' reports print, in claims/printed/; written with the reports.

A study that has claims.py says there, for every figure of its report's tables, from which recorded data it is evaluated
again, or why it cannot be. What is expected is what the report prints, to half a unit of its last digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from specsim.claims.files import SUFFIX, read_claims, write_claims
from studies.printed import Figure, figures_of

HOME = Path(__file__).parent
CLAIMED = tuple(sorted(path.parent.name for path in HOME.glob("*/claims.py")))
Entry = dict[str, Any]


def recorded(study: str, *parts: str) -> str:
    """A file that a study's real run left, from where the claims are."""
    return "/".join(["..", "..", "studies", study, "recorded", *parts])


def config(study: str) -> dict[str, Any]:
    """The configuration that a study's real run had."""
    return dict(json.loads((HOME / study / "recorded" / "config.json").read_text()))


def claims_file(study: str, home: Path = HOME) -> Path:
    """Where the claims of a study's report are. home : the folder of the studies"""
    return home.parent / "claims" / "printed" / f"{study}{SUFFIX}"


def split(study: str, home: Path = HOME) -> tuple[dict[str, Figure], dict[str, str]]:
    """The figures of a study's report that are claimed, by name, and why the others are not."""
    own = import_module(f"studies.{study}.claims")
    figures = figures_of(home / study / "report.md")
    why_not = {name: why for name, figure in figures.items() if (why := own.not_claimed(figure))}
    return {name: figure for name, figure in figures.items() if name not in why_not}, why_not


def stated(study: str, figure: Figure) -> Entry:
    """What a claim of this figure expects, in the unit of what is evaluated."""
    own = import_module(f"studies.{study}.claims")
    factor, less = own.unit(figure) if hasattr(own, "unit") else (1.0, 0.0)
    entry: Entry = {"expected": _plain(figure.value * factor - less), "tolerance": _plain(figure.tolerance * factor)}
    if figure.interval is not None:
        entry["interval"] = [_plain(end * factor - less) for end in figure.interval]
    return entry


def _plain(value: float) -> float:
    """Without what binary fractions add."""
    return float(f"{value:.12g}")


def differing(study: str, home: Path = HOME) -> Iterator[str]:
    """Figures of a study's report that its claims do not expect as they are printed, a line each."""
    claimed, _ = split(study, home)
    claims = {claim.name: claim.statement for claim in read_claims(claims_file(study))}
    for name in [*claimed, *claims]:
        if name not in claims or name not in claimed:
            yield f"{name}: {'not claimed' if name not in claims else 'claimed, but not printed'}"
    for name in claims.keys() & claimed.keys():
        figure, said = claimed[name], claims[name]
        printed, ends = stated(study, figure), [] if said.interval is None else said.interval
        numbers = [printed["expected"], printed["tolerance"], *printed.get("interval", [])]
        if numbers != [said.expected, said.tolerance, *ends]:
            yield f"{name}: printed {figure.text} {figure.interval or ''}, claimed {said.expected} {ends or ''}"


def write(study: str, results: Path, home: Path = HOME) -> dict[str, str]:
    """Write the claims of a study's report; why figures of it are not among them, by name.

    results : of the study, where it keeps what its recorded data do not hold
    """
    subject = import_module(f"studies.{study}.claims").subjects(results)
    claimed, why_not = split(study, home)
    entries = [{"name": name, **subject(figure), **stated(study, figure)} for name, figure in claimed.items()]
    source = f"studies/{study}/report.md"
    title = f"What {source} prints, evaluated again; written by `python -m studies {study}`."
    write_claims(claims_file(study, home), entries, title=title, defaults={"source": source})
    return why_not
