"""The page of `specsim claims check`: which claims still hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from specsim.replaying.intervals import interval_text
from specsim.report import figures
from specsim.report.figures import LONGEST_LABEL
from specsim.report.page import Result, definitions, figure, heading, notes_of, stack, tiles
from specsim.report.table import Column, as_html

COLORS = {"holds": "#007a5a", "drifted": "#d55e00", "contradicted": "#a4133c", "not decidable": "#b8860b"}


def _recomputed(claim: Mapping[str, Any]) -> str:
    value = claim["recomputed"]
    if value is None:
        return "; ".join(interval_text(step) for step in claim["order"] or ())
    return f"{value['estimate']:.4g}" if value["low"] == value["high"] else interval_text(value)


COLUMNS = (
    Column("claim", "name"),
    Column("claimed", "claimed"),
    Column("recomputed", _recomputed),
    Column("verdict", "verdict"),
)
DEFINITIONS = {
    "holds": "All that the value may be lies inside what is claimed.",
    "drifted": "An expected value lies outside its tolerance.",
    "contradicted": "A bound or an order does not hold.",
    "not decidable": "The interval straddles the bound; never a pass.",
}


def claims_result(document: Mapping[str, Any]) -> Result:
    """What a page shows of a check of claims. document : what `specsim claims check --json` prints"""
    claims = document["claims"]
    failed = [claim for claim in claims if not claim["passed"]]
    verdict = f"All {len(claims)} claims pass."
    if failed:
        named = [f"{claim['name']} ({claim['verdict']})" for claim in failed[:3]]
        more = f" and {len(failed) - 3} others" if len(failed) > 3 else ""
        verdict = f"{len(failed)} of {len(claims)} claims do not pass: {', '.join(named)}{more}."
    by_source: dict[str, Counter[str]] = {}
    for claim in claims:
        source = shorten(claim["source"] or "no source named", LONGEST_LABEL, placeholder=" ...")
        by_source.setdefault(source, Counter())[claim["verdict"]] += 1
    counts = {kind: [verdicts[kind] for verdicts in by_source.values()] for kind in COLORS}
    drawn = figures.shares(list(by_source), counts, COLORS, "claims")
    caption = "Claims by the source that they name, and verdict."
    ordered = sorted(claims, key=lambda claim: claim["passed"])
    rows = [{**claim, "row_class": "" if claim["passed"] else "wrong"} for claim in ordered]
    return Result(
        "Claims, evaluated again",
        "Claims",
        verdict,
        [
            tiles((str(number), kind) for kind, number in document["verdicts"].items()),
            stack([figure("wide", "Which claims hold?", drawn, caption)]),
            heading("Claims"),
            as_html("words", COLUMNS, rows),
            heading("Verdicts"),
            *definitions(DEFINITIONS),
        ],
        notes_of(document),
    )
