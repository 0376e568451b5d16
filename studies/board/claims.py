"""What the figures of the board's report are evaluated from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.claims import recorded
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_LADDER, OF_RUN, SHARES, is_median_of_ladder

OF_ROW: dict[str, list[str]] = {
    "predicted": ["speedup"],
    "to the leader": ["leader_minus_this", "difference"],
    "measured": ["measured"],
    "error %": ["error_percent"],
    "tau": ["tau"],
    "v_d": ["v_d"],
    "HM": ["hm"],
    "without loops": ["without_loops"],
    "rounds truncated %": ["truncated_share"],
}
OF_DRAFTER = {
    "first token accepted %": "first_token_accepted_share",
    "s_d / s_t": "step_ratio",
    "deepest draft, tokens": "depth",
}


def not_claimed(figure: Figure) -> str:
    if is_median_of_ladder(figure) or figure.column.startswith("90th percentile"):
        return MEDIAN
    if figure.column == "tokens trained on, M":
        return "stands in the drafter's own file, which is no JSON document"
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    return (0.01, 0.0) if figure.column in SHARES else (1.0, 0.0)


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return lambda figure: {"document": recorded("board", figure.section, "board.json"), "at": way(figure)}


def way(figure: Figure) -> list[Any]:
    """The way to a figure in the board of its section's run."""
    row, column = figure.row, figure.column
    if LADDER in row:
        return ["rows", {"label": row[LADDER]}, "ladder", OF_LADDER.get(column, column)]
    if "policy" in row:
        drafter = row["drafter"].removesuffix(" (own target)")
        form = row["policy"].partition(":")[0].removesuffix(" *")
        return ["rows", {"label": f"{drafter}, {form}"}, *OF_ROW[column]]
    if "drafter" in row:
        return ["drafters", {"name": row["drafter"]}, OF_DRAFTER[column]]
    return OF_RUN[column]
