"""The page of `specsim claims check`: which claims still hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from specsim.replaying.intervals import interval_text
from specsim.report.page import Result, definitions, figure, heading, notes_of, stack, tiles
from specsim.report.results import figures
from specsim.report.results.figures import LONGEST_LABEL
from specsim.report.table import Column, as_html

COLORS = {"holds": "#007a5a", "drifted": "#d55e00", "contradicted": "#a4133c", "not decidable": "#b8860b"}


def _recomputed(one: Mapping[str, Any]) -> str:
    if one["recomputed"] is None:
        return "; ".join(interval_text(step) for step in one["order"] or ())
    found = one["recomputed"]
    return f"{found['estimate']:.4g}" if found["low"] == found["high"] else interval_text(found)


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
    failed = [one for one in claims if not one["passed"]]
    verdict = f"All {len(claims)} claims pass."
    if failed:
        named = [f"{one['name']} ({one['verdict']})" for one in failed[:3]]
        more = f" and {len(failed) - 3} others" if len(failed) > 3 else ""
        verdict = f"{len(failed)} of {len(claims)} claims do not pass: {', '.join(named)}{more}."
    by_source: dict[str, Counter[str]] = {}
    for one in claims:
        source = shorten(one["source"] or "no source named", LONGEST_LABEL, placeholder=" ...")
        by_source.setdefault(source, Counter())[one["verdict"]] += 1
    counts = {kind: [found[kind] for found in by_source.values()] for kind in COLORS}
    drawn = figures.shares(list(by_source), counts, COLORS, "claims")
    caption = "Claims by the source that they name, and verdict."
    rows = [{**one, "row_class": "" if one["passed"] else "wrong"} for one in sorted(claims, key=lambda o: o["passed"])]
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
