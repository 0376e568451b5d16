"""What the figures of the report on AdaEDL are evaluated from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.claims import recorded
from studies.printed import Figure

DOCUMENT = recorded("adaedl", "found.json")
RUNS = {"0.7": "T07", "1": "T10", "1.3": "T13", "1.7": "T17"}
SETTINGS = {
    "K": ("fixed K, tuned", ["k"]),
    "Max-Confidence: lambda_0": ("Max-Confidence", ["lambda0"]),
    "paper's gamma: lambda_0": ("AdaEDL, paper's gamma", ["lambda0"]),
    "tuned: gamma, lambda_0": ("AdaEDL, gamma tuned", ["gamma", "lambda0"]),
}


def not_claimed(figure: Figure) -> str:
    if figure.section == "The score and what it bounds" and figure.column != "drafted tokens, as recorded":
        return "of every position in signals.npz, which claims do not read"
    return ""


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column = figure.row, figure.column
    at: list[Any] = ["rows", row["draft model"], RUNS[row["T"]]]
    if column == "drafted tokens, as recorded":
        return {"document": DOCUMENT, "at": [*at, "drafted"]}
    at += ["boards", figure.section.partition(" / ")[2]]
    if column == "s_d / s_t":
        return {"document": DOCUMENT, "at": [*at, "step_ratio"]}
    if column in SETTINGS:
        label, names = SETTINGS[column]
        return {"document": DOCUMENT, "at": [*at, "rows", {"label": label}, "settings", names[figure.number - 1]]}
    if " less " in column:
        return {"document": DOCUMENT, "difference": [speedup(at, label) for label in column.split(" less ")]}
    return {"document": DOCUMENT, **speedup(at, column)}


def speedup(at: list[Any], label: str) -> dict[str, Any]:
    return {"at": [*at, "baseline_s"], "over": [*at, "rows", {"label": label}, "seconds"]}
