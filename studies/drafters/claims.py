"""What the figures of the drafters' report are evaluated from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from studies.claims import HOME, recorded
from studies.printed import LADDER, Figure
from studies.run_figures import MEDIAN, OF_RUN, SHARES, is_median_of_ladder, measured_difference, of_row

OWN_FILE = "stands in the drafter's own file, which is no JSON document"
OF_ARM = {
    "acceleration rate": "acceleration_rate",
    "log-likelihood, nats per token": "log_likelihood_nats",
    "distinct trigrams": "distinct_trigram_share",
}
PARTS = {
    "drafting": "draft_ms_per_token",
    "verification": "verify_ms_per_token",
    "sampling (policy)": "policy_ms_per_token",
    "others": "other_ms_per_token",
    "ms per token": "ms_per_token",
}
CHEAP = ("best fixed K", "Beta-TS", "Cali-TS", "best threshold")


def not_claimed(figure: Figure) -> str:
    if figure.section in ("The drafters", "The predictor of Cali-TS"):
        return OWN_FILE
    if is_median_of_ladder(figure):
        return MEDIAN
    return ""


def unit(figure: Figure) -> tuple[float, float]:
    return (0.01, 0.0) if figure.column in SHARES or figure.number == 2 else (1.0, 0.0)  # a part's share comes second


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column, run = figure.row, figure.column, figure.section
    if "epsilon" in row:
        arm: dict[str, Any] = {"arm": row["verification"].removesuffix(", loss-free")}
        if row["epsilon"]:
            arm["epsilon"] = float(row["epsilon"])
        return {"document": recorded("drafters", "typical.json"), "at": ["arms", arm, OF_ARM[column]]}
    drafter = row[LADDER].partition(",")[0] if LADDER in row else row.get("drafter") or row["run"]
    document = recorded("drafters", run, drafter, "replayed.json")
    if "run" in row:
        return {"document": document, "at": OF_RUN[column]}
    if "Thompson sampling" in row:
        return gain(document, row["fixed K"], row["Thompson sampling"], column)
    if "policy" not in row and LADDER not in row:
        return cheap(run, drafter, column)
    if column in PARTS:
        parts = [{"quantity": quantity} for quantity in (PARTS[column], PARTS["ms per token"])]
        wanted = parts[0] if figure.number == 1 else {"ratio": parts}
        return {"validation": document, "policy": row["policy"], **wanted}
    label = (row.get("policy") or row[LADDER]).partition(": ")[2]
    at = ["rows", {"label": label}]
    if column == "acceleration rate":
        return {"document": document, "at": [*at, "measured_tau"]}
    if column == "overhead":
        return {"document": document, "at": [*at, "overhead"]}
    if column == "rate / overhead":
        return {"document": document, "ratio": [{"at": [*at, key]} for key in ("measured_tau", "overhead")]}
    return of_row(document, label, column.removesuffix(" speedup"))


def gain(document: str, fixed: str, sampled: str, column: str) -> dict[str, Any]:
    """Of the table of what Thompson sampling adds to the best fixed K."""
    if column == "gain":
        return measured_difference(document, sampled, fixed)
    if column == "predicted gain":
        both = [{"at": ["rows", {"label": label}, "predicted", "estimate"]} for label in (sampled, fixed)]
        return {"document": document, "difference": both}
    return of_row(document, fixed if column.endswith("fixed") else sampled, "measured")


def cheap(run: str, drafter: str, column: str) -> dict[str, Any]:
    """Of the table of replays with a cheap draft step, whose rows are chosen as the report chooses them."""
    document = recorded("drafters", run, drafter, "cheap.json")
    fixed, sampled, found = chosen(run, drafter)
    if column in CHEAP:
        return {"document": document, "at": ["baseline_s"], "over": found[column]}
    both = [{"at": ["baseline_s"], "over": over} for over in (sampled, fixed)]
    return {"document": document, "difference": both}


@cache
def chosen(run: str, drafter: str) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """The ways to the seconds of the best fixed K, the best Thompson sampling, and every contender."""
    from studies.drafters.tables import TS, best, contenders

    rows = json.loads((HOME / "drafters" / "recorded" / run / drafter / "cheap.json").read_text())["rows"]
    mine = {"rows": [{**row, "role": "tuned" if row["tuned"] else "default"} for row in rows]}
    found = {name: ["rows", {"label": row["label"]}, "sequence_seconds"] for name, row in contenders(mine)}
    sampled = best(mine, *TS)
    assert sampled is not None
    return found["best fixed K"], ["rows", {"label": sampled["label"]}, "sequence_seconds"], found
