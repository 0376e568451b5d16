"""The page of `specsim serve schedule`: the best draft length by batch, and where speculation stops paying."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.report import figures
from specsim.report.page import Result, definitions, facts, figure, heading, notes_of, spread_text, stack, tiles
from specsim.report.table import SPEEDUP, Column, as_html, plain

COLUMNS = (
    Column("batch", "batch"),
    Column("best", "best"),
    Column("speedup [95 %]", "speedup", SPEEDUP),
    Column("tokens/s without", "baseline", plain("{:,.0f}".format)),
)
DEFINITIONS = {
    "Batch": "Number of sequences in every forward pass. It is always full: a finished request is replaced at once.",
    "Speedup": "Tokens per second with speculation over tokens per second of the same batch without, with a 95 % "
    "interval over sequences.",
    "Goodput": "A rule that chooses, in every round, the K with the most expected tokens per second, given the "
    "acceptance so far and the current batch.",
    "Breaks even": "The batch beyond which no draft length that was weighed is faster than none; between batches the "
    "logarithm of the speedup is taken to be linear in that of the batch.",
}


def batches_result(document: Mapping[str, Any]) -> Result:
    """What a page shows of speedups by batch. document : what `specsim serve schedule --json` prints"""
    body: list[str] = []
    boxes: list[tuple[str, str]] = []
    verdicts = []
    for number, (context, even) in enumerate(zip(document["contexts"], document["break_even"], strict=True)):
        where = "at the trace's contexts" if context is None else f"at a context of {context:,}"
        cells = [cell for cell in document["cells"] if cell["context"] == context]
        rows = [
            {
                "batch": str(cell["batch"]),
                "best": cell["best"] if cell["speedup"][cell["best"]]["estimate"] > 1 else "no speculation",
                "speedup": cell["speedup"][cell["best"]],
                "baseline": cell["baseline_tokens_per_s"],
            }
            for cell in cells
        ]
        verdicts.append(_verdict(rows, even, where))
        top = rows[0]
        spread = spread_text(top["speedup"], document)
        boxes.append((f"{top['speedup']['estimate']:.2f}", f"{top['best']} at batch {top['batch']}, {where}: {spread}"))
        lines = {label: [cell["speedup"][label] for cell in cells] for label in cells[0]["speedup"]}
        drawn = figures.by_batch([cell["batch"] for cell in cells], lines, f"batches-{number}")
        caption = "Below the dashed line speculation costs more than it gains; bands are 95 % intervals."
        body += [
            heading(f"Speedup {where}"),
            as_html("schedule", COLUMNS, rows),
            stack([figure("wide", "Which draft length, for which batch?", drawn, caption)]),
        ]
    ranges = (
        (f"{'all contexts' if schedule['context'] is None else schedule['context']}", _ranges(schedule["ranges"]))
        for schedule in document["schedules"]
    )
    body = [tiles(boxes), *body, heading("Schedules"), facts(ranges), heading("Definitions"), *definitions(DEFINITIONS)]
    return Result("Speculation in full batches", "Draft lengths by batch", " ".join(verdicts), body, notes_of(document))


def _verdict(rows: list[dict[str, Any]], even: Mapping[str, Any], where: str) -> str:
    top = rows[0]
    gain = f"{top['best']} is best at batch {top['batch']}, {top['speedup']['estimate']:.2f} times"
    if even["batch"] is None:
        return f"{where.capitalize()}, {gain}, and a fixed K still gains at a batch of {even['largest_batch']}."
    if not even["batch"]:
        return f"{where.capitalize()}, every fixed K loses at every batch."
    return f"{where.capitalize()}, {gain}; beyond a batch of {even['batch']:.0f} every fixed K loses."


def _ranges(ranges: list[list[int]]) -> str:
    """First batch, last batch, K of every part, in words."""
    return "; ".join(f"batch {first} to {last}: K = {k}" for first, last, k in ranges)
