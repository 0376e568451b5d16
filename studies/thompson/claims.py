"""What the figures of the report on Thompson sampling are evaluated from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.claims import recorded
from studies.printed import Figure

DOCUMENT = recorded("thompson", "found.json")
DRAFTERS = {"draft model": "model", "EAGLE": "eagle"}
BEST_FIXED, BEST_EACH = "fixed K", "K of each prompt, in hindsight"
ACCEPTED = {1: "mean", 2: "spread"}


def not_claimed(figure: Figure) -> str:
    if figure.column == "K":
        return "a setting, which is no number of the record"
    if "spread" not in figure.row and "run" not in figure.row and figure.number == 1:
        return "the first of several spreads, of gains that are claimed"
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    """A gain of x percent is a ratio of 1 + x / 100."""
    return (0.01, -1.0) if is_gain(figure) else (1.0, 0.0)


def is_gain(figure: Figure) -> bool:
    return not (figure.column.startswith("accepted") or figure.column == "speedup of K")


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column = figure.row, figure.column
    cost = figure.section.partition(" / ")[2].removesuffix(", synthetic")
    drafter = DRAFTERS[row["drafter"]]
    if "run" in row:
        at: list[Any] = ["pools", cost, row["run"], drafter, row["prompts"].partition(" (")[0]]
    else:
        at = ["synthetic", cost, drafter, row.get("spread") or row[column].split()[1]]
    if column.startswith("accepted"):
        return {"document": DOCUMENT, "at": [*at, "acceptance", ACCEPTED[figure.number]]}
    if column == "speedup of K":
        return {"document": DOCUMENT, "at": [*at, "baseline_s"], "over": seconds(at, BEST_FIXED)}
    label = column.removesuffix(" %") if "run" in row or "spread" in row else BEST_EACH
    return {"document": DOCUMENT, "at": seconds(at, BEST_FIXED), "over": seconds(at, label)}


def seconds(at: list[Any], label: str) -> list[Any]:
    return [*at, "rows", {"label": label}, "seconds"]
