"""What the figures of the report on EDD and candidate trees are evaluated from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, config, recorded
from studies.edd.jobs import EDD, FACTS, short
from studies.edd.tables import NAMES, Document, top
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_RUN, SHARES, is_median_of_ladder, of_row

STUDY = "edd"
REPLAYED = "The same trace replayed, "
FOLDERS = {name: folder for folder, name in NAMES.items()}  # of the drafters, by what the report calls them
OF_FACTS = {"trained parameters": ["parameters"], "tokens seen, M": ["tokens"], "text": ["text", "generated_share"]}
OF_DOCUMENT = {"s_d / s_t": ["step_ratio"], "first token accepted %": ["first_token_accepted_share"]}
OF_BOARD = {
    "tau": "tau",
    "verified": "mean_draft_tokens",
    "rounds truncated %": "truncated_share",
    "speedup": "speedup",
}
OF_ROUNDS = {"drafted": "mean_drafted_tokens", "verified": "mean_verified_tokens"}
FACTORS = {"tokens seen, M": 1e6, "text": 0.01} | dict.fromkeys(SHARES, 0.01)


def not_claimed(figure: Figure) -> str:
    return MEDIAN if is_median_of_ladder(figure) else ""


def unit(figure: Figure) -> tuple[float, float]:
    return FACTORS.get(figure.column, 1.0), 0.0


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column = figure.row, figure.column
    run = figure.section.partition(" / ")[0]
    if REPLAYED in figure.section:
        return on_board(run, figure.section.partition(REPLAYED)[2].partition(", every policy")[0], figure)
    if column in OF_FACTS:
        return {"document": recorded(STUDY, FACTS), "at": [FOLDERS[row["drafter"]], *OF_FACTS[column]]}
    if column in OF_DOCUMENT:
        return {"document": replayed(config(STUDY)["runs"][0]["name"], row["drafter"]), "at": OF_DOCUMENT[column]}
    if "run" in row:
        return {"document": replayed(run, row["run"]), "at": OF_RUN[column]}
    if LADDER in row:
        drafter, _, label = row[LADDER].partition(", ")
        return of_row(replayed(run, drafter), label, column)
    label = row["policy"]
    if "tree" in row:
        document = replayed(run, NAMES[EDD])
        if column in OF_ROUNDS:
            return {"validation": document, "policy": label, "quantity": OF_ROUNDS[column]}
        return of_row(document, label, column)
    document = replayed(run, row["drafter"])
    if column.startswith("alpha"):
        ways = (["tau"], ["params", "k"])
        return {"document": document, "ratio": [{"at": ["rows", {"label": label}, *way]} for way in ways]}
    return of_row(document, label, column.removeprefix("acceptance rate "))


def on_board(run: str, costs: str, figure: Figure) -> dict[str, Any]:
    """Of a tree replayed at these costs, and its difference to PCT in the form that the report takes."""
    name = f"board-{short(costs)}.json"
    document, label = recorded(STUDY, run, EDD, name), figure.row["policy"]
    if figure.column != "less PCT":
        return {"document": document, "at": ["rows", {"label": label}, OF_BOARD[figure.column]]}
    pct = top(board(run, name), "pct")
    assert pct is not None
    seconds = (["rows", {"label": one}, "sequence_seconds"] for one in (label, pct["label"]))
    return {"document": document, "difference": [{"at": ["baseline_s"], "over": over} for over in seconds]}


def replayed(run: str, drafter: str) -> str:
    """The document of a drafter's real run. drafter : as the report calls it"""
    return recorded(STUDY, run, FOLDERS[drafter], "replayed.json")


@cache
def board(run: str, name: str) -> Document:
    return dict(json.loads((HOME / STUDY / "recorded" / run / EDD / name).read_text()))
