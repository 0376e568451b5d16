"""What the figures of the report on batches are evaluated from: its traces, replayed and served again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.claims import recorded
from studies.printed import Figure

MOST_BATCH = 256
GOODPUT = "goodput rule"


def not_claimed(figure: Figure) -> str:
    if "arm" in figure.row or "best K measured" in figure.row:
        return "the study's own prediction from probes of a real run, which claims do not make"
    if "form" in figure.row:
        return "errors of forms fitted to a real run's probes, which claims do not fit"
    if "costs" in figure.row:
        return "prices of single steps, and schedules, of which every speedup is claimed"
    if figure.column == "sequences" or (figure.several and figure.number == 1):
        return "a count, or the K whose speedup is claimed"
    if "batch" in figure.row and int(figure.row["batch"]) > MOST_BATCH:
        return f"a batch above {MOST_BATCH}, whose simulation takes too long for the default tests"
    if figure.column.startswith(GOODPUT) and "roofline" in figure.section:
        return "the goodput rule over a roofline, whose simulation takes too long for the default tests"
    return ""


def subjects(results: Path) -> Callable[[Figure], dict[str, Any]]:
    return subject


def subject(figure: Figure) -> dict[str, Any]:
    row, column = figure.row, figure.column
    if "trace" in row:
        policy = {"policy": "fixed_k", "settings": {"k": int(column.removeprefix("K="))}}
        costs = {"s_d": 0.1, "s_t": 1.0}  # of which tokens a round know nothing
        return {"trace": recorded("batches", "traces", row["trace"]), "cost": costs, **policy, "quantity": "tau"}
    server, trace = figure.section.rpartition(" / ")[2].rsplit(", ", 1)
    context = column.rpartition("context ")[2]
    if column.startswith(GOODPUT):
        policy = {"policy": "goodput", "settings": {"max_draft_tokens": 8}}
    else:
        (k,) = re.findall(r"^K=(\d+):", row[column])
        policy = {"policy": "fixed_k", "settings": {"k": int(k)}}
    served = {"serving": recorded("batches", "traces", trace), "cost": cost_of(server)}
    return {**served, "batch": int(row["batch"]), "context": int(context), **policy}


def cost_of(server: str) -> str:
    """The costs of a server, as a file or a name that ships."""
    if server.startswith("roofline "):
        return f"../../studies/batches/rooflines/{server.removeprefix('roofline ').lower()}.json"
    return "vllm-llama3.1-8b-eagle-h100"
