"""What the figures of EDD's report are evaluated from: its real runs, and boards of what they recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, config, recorded
from studies.edd.jobs import EDD, short
from studies.edd.tables import NAMES
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_RUN, SHARES, is_median_of_ladder, of_row

STUDY = "edd"
DRAFTERS = {name: drafter for drafter, name in NAMES.items()}
OF_DRAFTER: dict[str, list[str]] = {
    "trained parameters": ["facts", "parameters"],
    "tokens seen, M": ["facts", "tokens"],
    "text": ["facts", "text", "generated_share"],
    "s_d / s_t": ["step_ratio"],
    "first token accepted %": ["first_token_accepted_share"],
}
OF_ROUNDS = {"drafted": "mean_drafted_tokens", "verified": "mean_verified_tokens"}
OF_BOARD = {"tau": "tau", "verified": "mean_draft_tokens", "rounds truncated %": "truncated_share"}


def not_claimed(figure: Figure) -> str:
    return MEDIAN if is_median_of_ladder(figure) else ""


def unit(figure: Figure) -> tuple[float, float]:
    if figure.column == "tokens seen, M":
        return 1e6, 0.0
    return (0.01, 0.0) if figure.column in (*SHARES, "text") else (1.0, 0.0)


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column = figure.row, figure.column
    if column in OF_DRAFTER:
        return {"document": document(first_run(), DRAFTERS[row["drafter"]]), "at": OF_DRAFTER[column]}
    run = figure.section.partition(" / ")[0]
    if "run" in row:
        return {"document": document(run, DRAFTERS[row["run"]]), "at": OF_RUN[column]}
    if LADDER in row:
        name, _, label = row[LADDER].partition(", ")
        return of_row(document(run, DRAFTERS[name]), label, column)
    if "less PCT" in row:
        return replayed(run, figure)
    ran = document(run, DRAFTERS[row["drafter"]] if "drafter" in row else EDD)
    if column in OF_ROUNDS:
        return {"validation": ran, "policy": row["policy"], "quantity": OF_ROUNDS[column]}
    if column.startswith("alpha"):
        ways = [["rows", {"label": row["policy"]}, *rest] for rest in (["tau"], ["params", "k"])]
        return {"document": ran, "ratio": [{"at": way} for way in ways]}
    return of_row(ran, row["policy"], column.removeprefix("acceptance rate "))


def replayed(run: str, figure: Figure) -> dict[str, Any]:
    """Of the trees replayed at costs that need no machine, which stand in the table's caption."""
    costs = next(what for what in figure.section.split(", ") if what in ("paper's costs", "knee"))
    board = recorded(STUDY, run, EDD, f"board-{short(costs)}.json")
    row, column = ["rows", {"label": figure.row["policy"]}], figure.column
    if column in OF_BOARD:
        return {"document": board, "at": [*row, OF_BOARD[column]]}
    speedup = {"at": ["baseline_s"], "over": [*row, "sequence_seconds"]}
    if column == "speedup":
        return {"document": board, **speedup}
    pct = {"at": ["baseline_s"], "over": ["rows", {"label": best_pct(run, costs)}, "sequence_seconds"]}
    return {"document": board, "difference": [speedup, pct]}


def document(run: str, drafter: str) -> str:
    return recorded(STUDY, run, drafter, "replayed.json")


def first_run() -> str:
    """The one that the table of drafters is of."""
    return str(config(STUDY)["runs"][0]["name"])


@cache
def best_pct(run: str, costs: str) -> str:
    """PCT's best form at these costs, as the report chooses it."""
    from studies.common import without_truncated
    from studies.edd.tables import top

    path = HOME / STUDY / "recorded" / run / EDD / f"board-{short(costs)}.json"
    row = top(without_truncated(json.loads(path.read_text())), "pct")
    assert row is not None
    return str(row["label"])
