"""What the figures of SPACE's report are evaluated from: its traces, replayed again, and its real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, config, recorded
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_RUN, is_median_of_ladder, of_row

FREE = "passes at one price"
QUANTITIES = {"tokens a pass": "tau", "v_d": "v_d", "tokens fed": "mean_draft_tokens", "predicted": "speedup"}


def not_claimed(figure: Figure) -> str:
    if is_median_of_ladder(figure):
        return MEDIAN
    if figure.column == "tokens fed" and figure.row["policy"].startswith("space_k"):
        return "follows from k alone"
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    """A pass that verifies m candidates of 5 masks feeds 6 (m + 1) tokens."""
    return (1 / 6, 1.0) if figure.column == "tokens fed" else (1.0, 0.0)


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column, run = figure.row, figure.column, figure.section
    document = recorded("space", run, "replayed.json")
    if "run" in row:
        return {"document": document, "at": OF_RUN[column]}
    if LADDER in row or column in ("measured", "error %"):
        return of_row(document, row.get(LADDER) or row["policy"], column)
    policy, params = settings(run)[row["policy"]]
    cost = {"s_d": 1e-9, "s_t": 1.0} if column == FREE else recorded("space", run, "profile.json")
    replayed = {"trace": recorded("space", run, "trace"), "cost": cost, "tuning_share": config("space")["tuning_share"]}
    quantity = QUANTITIES.get(column, "speedup")
    return {**replayed, "policy": policy, "settings": params, "quantity": quantity}


@cache
def settings(run: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The policies that were really run, by label."""
    rows = json.loads((HOME / "space" / "recorded" / run / "replayed.json").read_text())["rows"]
    return {row["label"]: (row["policy"], row["params"]) for row in rows}
