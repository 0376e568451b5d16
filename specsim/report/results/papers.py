"""The page of `specsim papers audit`: what the papers' own tables say of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.report.page import Result, definitions, figure, tiles
from specsim.report.results import figures
from specsim.report.table import Column, as_html

COLORS = {"supports": "#007a5a", "contradicts": "#d55e00", "cannot decide": "#b8860b"}


def _value(one: Mapping[str, Any]) -> str:
    value = f"{one['value']:.4g} {one['unit']}".rstrip()
    return value if one["low"] is None or one["high"] is None else f"{value} [{one['low']:.4g}, {one['high']:.4g}]"


COLUMNS = (
    Column("finding", "text"),
    Column("figure", _value),
    Column("tables", lambda one: ", ".join(one["tables"])),
    Column("erratum", "erratum"),
    Column("verdict", "verdict"),
)
DEFINITIONS = {
    "Finding": "A figure recomputed from printed ones, with the interval that their rounding leaves it.",
    "supports, contradicts, cannot decide": "What the paper's own figures say of what it prints or writes.",
}


def papers_result(document: Mapping[str, Any]) -> Result:
    """What a page shows of the audit. document : what `specsim papers audit --json` prints"""
    found, changed = document["findings"], document["changed_verdicts"]
    papers = list(dict.fromkeys(one["paper"] for one in found))
    counts = {
        verdict: [sum(one["paper"] == paper and one["verdict"] == verdict for one in found) for paper in papers]
        for verdict in COLORS
    }
    totals = {verdict: sum(numbers) for verdict, numbers in counts.items()}
    verdict = (
        f"Of {len(found):,} figures recomputed, the papers' own tables support {totals['supports']:,}, contradict "
        f"{totals['contradicts']:,} and cannot decide {totals['cannot decide']:,}."
    )
    if changed:
        verdict = f"{len(changed)} verdicts are not the recorded ones. {verdict}"
    drawn = figures.shares(papers, counts, COLORS, "papers")
    against = [{**one, "row_class": "wrong"} for one in found if one["verdict"] == "contradicts"]
    return Result(
        "Papers' tables, recomputed",
        "Audit of the papers",
        verdict,
        [
            tiles((f"{number:,}", kind) for kind, number in totals.items()),
            f'<div class="stack">{figure("wide", "Do the papers agree with themselves?", drawn, "By paper.")}</div>',
            "<h2>What contradicts</h2>",
            as_html("words", COLUMNS, against),
            "<h2>Definitions</h2>",
            *definitions(DEFINITIONS),
        ],
    )
