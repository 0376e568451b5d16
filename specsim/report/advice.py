"""The page of `specsim advise`: speedup by draft length, and by number of requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.report.page import Result, definitions, facts, figure, heading, stack
from specsim.report.table import SPEEDUP, TWO, Column, Row, as_html, plain

KIND, VERSION = "specsim-advice", 1
SHARE = plain(lambda share: f"{100 * share:.0f} %")
COLUMNS = (
    Column("K", "k"),
    Column("tokens per step", "tokens_per_round", TWO),
    Column("speedup [95 %]", "speedup", SPEEDUP),
    Column("best", "best", SHARE),
)
WITHOUT_INTERVAL = (
    *COLUMNS[:2],
    Column("speedup, error unknown", "speedup", plain(lambda value: f"{value['estimate']:.2f}")),
    *COLUMNS[3:],
)
DEFINITIONS = {
    "K": "Tokens that the drafter proposes in every round; 0 is decoding without speculation.",
    "Speedup": "Tokens per second over those of decoding without speculation, with a 95 % interval.",
    "Best": "How likely this K is the fastest.",
}


def advice_result(document: Mapping[str, Any]) -> Result:
    """What a page shows of an advice. document : what `specsim advise --json` prints"""
    from specsim.report import figures  # matplotlib is slow to import, and wants to write

    lengths = [
        {**length, "row_class": "best" if length["k"] == document["k"] else ""} for length in document["lengths"]
    ]
    drawn = figures.by_length([length["k"] for length in lengths], [length["speedup"] for length in lengths])
    caption = "Below the dashed line speculation costs more than it gains; bars are 95 % intervals."
    body = [stack([figure("wide", "Which draft length?", drawn, caption)])]
    if by_load := document.get("by_load"):
        shown = [at for at, batch in enumerate(by_load["batches"]) if batch & (batch - 1) == 0]  # powers of 2
        lines = {f"K = {k}": [values[at] for at in shown] for k, values in by_load["speedups"].items() if int(k)}
        points = {label: [dict.fromkeys(("estimate", "low", "high"), v) for v in line] for label, line in lines.items()}
        loads = figures.by_batch([by_load["batches"][at] for at in shown], points, "advice-load")
        about = (
            "Acceptance is taken not to depend on the load. Estimates alone; the table has the interval at one load."
        )
        body += [heading("Speedup by load"), stack([figure("wide", "Until when does it pay?", loads, about)])]
    columns = COLUMNS if document.get("error_known", True) else WITHOUT_INTERVAL
    body += [heading("Draft lengths"), as_html("advice", columns, lengths)]
    asked = {name: str(value) for name, value in document["asked"].items() if value is not None}
    body += [heading("What was asked"), facts(asked.items()), heading("Definitions"), *definitions(DEFINITIONS)]
    flags = [document["flags"]] if document.get("flags") else []
    verdict = _verdict(document["k"], lengths, interval=document.get("error_known", True))
    return Result("Draft length from a server's counts", "Which K?", verdict, body, [*flags, *document["notes"]])


def _verdict(k: int | None, lengths: Sequence[Row], *, interval: bool) -> str:
    drafting = [length for length in lengths if length["k"]] if not k else [lengths[k]]
    best = max(drafting, key=lambda length: float(length["speedup"]["estimate"]))
    value = best["speedup"]
    within = f" ({value['low']:.2f} to {value['high']:.2f})" if interval else ""
    text = f"{value['estimate']:.2f} times{within} as fast as without speculation"
    if k is None:
        return f"Not decidable: K = {best['k']} is {text}. Measure K = 0 and K = {best['k']}."
    if not k:
        return f"Turn speculation off: no counted draft length is faster; the best, K = {best['k']}, is {text}."
    return f"K = {k} is {text}."
