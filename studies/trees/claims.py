"""What the figures of the trees' report are evaluated from: its real runs, and what was found on their traces."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, recorded
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_RUN, is_median_of_ladder, measured_difference, of_row
from studies.trees.facts import PERCENTILES, opponents
from studies.trees.text import OURS

STUDY = "trees"
QUESTION, WIDTH, PROBABILITY = "question", "PCT's width", "probability of a node, given its parent"
OF_ROUNDS = {  # lists by sequence
    "nodes verified": "verified_nodes",
    "draft passes": "draft_passes",
    "rounds truncated %": "truncated_rounds",
}
OF_BOARD = {"speedup": "speedup", "tau": "tau", "regret": "oracle_regret"}
OF_WIDTH = {"nodes verified": "nodes", "tau": "tau", "rounds truncated %": "truncated"}
OF_DOMAIN = {"tau": ["tau"], "rounds truncated %": ["truncated"], "nodes, mean": ["nodes_mean"]}
OF_DOMAIN |= {f"{percent} %": ["nodes_percentiles", at] for at, percent in enumerate(PERCENTILES)}
OF_CALIBRATION = {"log-loss (nats)": "log_loss_nats", "ECE": "ece"}


def not_claimed(figure: Figure) -> str:
    question = figure.row.get(QUESTION, "")
    if is_median_of_ladder(figure) or question.startswith(("absolute error", "rounds")):
        return MEDIAN
    if question and not question.startswith(("PCT's nodes", "recording")):
        return "stands in a table further down as well"
    if figure.row.get("policy") == "oracle" and figure.column == "regret":
        return "0, as every regret is one against the oracle"
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    share = figure.row.get(QUESTION, "").startswith("PCT's nodes")
    return (0.01, 0.0) if share or figure.column in ("rounds truncated %", "regret") else (1.0, 0.0)


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column = figure.row, figure.column
    if "run" in row:
        return {"document": replayed(row["run"]), "at": OF_RUN[column]}
    if QUESTION in row:
        return answer(figure)
    run, _, about = figure.section.partition(": ")
    document = recorded(STUDY, run, "found.json")
    if about == "predicted and measured":
        return really_run(run, figure)
    if "against" in row:
        return gain(run, row["against"], column)
    if WIDTH in row:
        return {"document": document, "at": ["widths", {"width": int(row[WIDTH])}, OF_WIDTH[column]]}
    if "nodes" in row:
        return {"document": document, "at": static(run, int(row["nodes"]), column)}
    if "domain" in row:
        return {"document": document, "at": ["domains", row["policy"], row["domain"], *OF_DOMAIN[column]]}
    if PROBABILITY in row:
        return {"document": document, "at": ["calibration", row[PROBABILITY], OF_CALIBRATION[column]]}
    cost = about.removeprefix("all policies, ")
    if row["policy"] == "oracle":
        return {"document": document, "at": ["boards", cost, "oracle"]}
    if column in OF_ROUNDS:
        labels = [one["label"] for one in found(run)["boards"][cost]["rows"]]
        return {"document": document, **of_rounds(["rounds", cost, labels.index(row["policy"])], column)}
    return {"document": document, "at": ["boards", cost, "rows", {"label": row["policy"]}, OF_BOARD[column]]}


def answer(figure: Figure) -> dict[str, Any]:
    document = recorded(STUDY, figure.column, "found.json")
    if figure.row[QUESTION].startswith("recording"):
        return {"document": document, "at": ["record_ratio"]}
    counted = ("verified_nodes", "output_tokens")[figure.number - 1]
    ways = [["paper", policy] for policy in ("pct", "eagle2")]
    return {
        "document": document,
        "ratio": [{"at": [*way, counted], "over": [*way, "num_rounds"]} for way in ways],
    }


def really_run(run: str, figure: Figure) -> dict[str, Any]:
    """Of a policy that was really run, and its replay on the same sequences."""
    row, column = figure.row, figure.column
    if LADDER in row:
        return of_row(replayed(run), row[LADDER], column)
    label = row["policy"].rpartition(" (")[0]
    if column == "tau, measured":
        return {"document": replayed(run), "at": ["rows", {"label": label}, "measured_tau"]}
    if column in OF_ROUNDS:
        labels = [one["label"] for one in ran(run)["rows"]]
        return {
            "document": recorded(STUDY, run, "found.json"),
            **of_rounds(["measured", labels.index(label)], column),
        }
    return of_row(replayed(run), label, column)


def of_rounds(way: list[Any], column: str) -> dict[str, Any]:
    """The mean over rounds of what was counted of them by sequence."""
    return {"at": [*way, OF_ROUNDS[column]], "over": [*way, "num_rounds"]}


def gain(run: str, against: str, column: str) -> dict[str, Any]:
    """The speedup of ours less another's, replayed on a board or really run."""
    cost = column.removesuffix(", replayed")
    really = column == "really run"
    boards = found(run)["boards"]
    board = next(iter(boards.values())) if really else boards[cost]
    (rows,) = ((placed, measured) for who, placed, measured in opponents(board, ran(run)) if who == against)
    other, rows_there = rows[really], (ran(run) if really else board)["rows"]
    ours = next(row for row in rows_there if row["policy"] == OURS)
    assert other is not None
    if really:
        return measured_difference(replayed(run), ours["label"], other["label"])
    way = ["boards", cost]
    both = [
        {"at": [*way, "baseline_s"], "over": [*way, "rows", {"label": one["label"]}, "sequence_seconds"]}
        for one in (ours, other)
    ]
    return {"document": recorded(STUDY, run, "found.json"), "difference": both}


def static(run: str, nodes: int, column: str) -> list[Any]:
    """The way to a static tree of so many nodes, or to the dense one of at most as many that the report chooses."""
    if column.startswith("tau, best dense"):
        dense = found(run)["sizes"][0]
        within = [at for at, one in enumerate(dense) if one["nodes"] <= nodes]
        return ["sizes", 0, max(within, key=lambda at: float(dense[at]["expected"])), "tokens"]
    point = ["sizes", 1, {"nodes": nodes}]
    return [*point, "tokens"] if column == "tau, sparse" else [*point, "speedups", column.removeprefix("sparse: ")]


def replayed(run: str) -> str:
    return recorded(STUDY, run, "replayed.json")


@cache
def found(run: str) -> Mapping[str, Any]:
    return _read(run, "found.json")


@cache
def ran(run: str) -> Mapping[str, Any]:
    return _read(run, "replayed.json")


def _read(run: str, name: str) -> Mapping[str, Any]:
    return dict(json.loads((HOME / STUDY / "recorded" / run / name).read_text()))
