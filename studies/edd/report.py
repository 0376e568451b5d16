"""The report on EDD: which candidate tree is fastest on it, beside other drafters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from specsim.policy.registry import TREE_POLICIES
from specsim.replaying.intervals import paired_difference
from specsim.report.page import comparable_text
from specsim.report.table import Column
from studies.common import Config, Document
from studies.comparisons import (
    best_by,
    board_rows,
    differ_measured,
    first_best,
    measured_columns,
    order_of,
    rows_over_runs,
    table_rows,
)
from studies.edd.jobs import EDD
from studies.figures import speedup_dots
from studies.paper_costs import PAPER
from studies.report import Report, trust_lines

NAMES = {"vdm": "VDM", "medusa-1": "MEDUSA-1", "eagle": "EAGLE", "edd": "EDD"}
TREES = {"vct": "VCT", "cape": "CAPE", "eagle2": "EAGLE-2", "pct": "PCT", "hardware_pct": "hardware-aware PCT"}
PAPER_TREES = ("vct", "cape", "eagle2", "pct")  # by rising speedup in the paper's table 2, in 14 of its 16 cells

Row = Mapping[str, Any]
Documents = Mapping[str, Document]  # validations by drafter


def report(config: Config, facts: Document, runs: Mapping[str, Documents], boards: Mapping[str, Documents]) -> Report:
    """Return the report. facts : of the drafters' files; runs, boards : by way of decoding, then drafter or costs"""
    first, documents = next(iter(runs.items()))
    order = partial(order_of, expected=PAPER_TREES, names=TREES)
    trees = best_by(documents[EDD]["rows"], "policy")
    replayed = boards[first][PAPER]
    at_paper = best_by(replayed["rows"], "policy")
    others = [run for run in runs if run != first]
    shown = rows_over_runs({run: contenders(ran) for run, ran in runs.items()})

    def differ_replayed(a: str, b: str) -> bool:
        seconds = (at_paper[name]["sequence_seconds"] for name in (a, b))
        return paired_difference(replayed["baseline_s"], *seconds).significant

    measured = order(
        {name: trees[name]["measured"]["estimate"] for name in PAPER_TREES},
        differ=lambda a, b: differ_measured(documents[EDD], trees[a], trees[b]),
    )
    paper = order(
        {name: at_paper[name]["speedup"]["estimate"] for name in PAPER_TREES if name in at_paper},
        differ=differ_replayed,
    )
    sizes = ", ".join(f"{NAMES[name]} {fact['parameters'] / 1e6:.2f} M" for name, fact in facts.items())
    return Report(
        question="Which candidate tree is fastest on EDD?",
        answer=f"By measured speedup in {first} decoding, the trees on EDD rank {measured}. Replayed at the paper's "
        f"costs they rank {paper}.",
        figure=speedup_dots([(row["name"], row) for row in shown], "drafters-greedy", "Drafters and trees on EDD"),
        figure_name="drafters-greedy",
        caption=f"Predicted and measured speedup of drafters as chains and of trees on EDD, {first} decoding",
        columns=measured_columns([Column("drafter and policy", "name")], list(runs)),
        shown=shown,
        table=[
            *(
                row
                for run, ran in runs.items()
                for drafter, document in ran.items()
                for row in table_rows(run, document["rows"], drafter=drafter, costs="measured costs")
            ),
            *(
                row
                for run, by_costs in boards.items()
                for costs, board in by_costs.items()
                for row in board_rows(run, board, drafter=EDD, costs=f"{costs}, replayed only")
            ),
        ],
        trust=[
            *trust_lines(config, {f"{NAMES[name]}": document for name, document in documents.items()}),
            *(f"{run}: {text}" for run in others for text in comparable_text(runs[run])),
            f"All drafters saw the same 5 M tokens; each structure decides its trained parameters: {sizes}.",
            "Each policy is shown in the form that was best on the tuning prompts; ~ joins neighbours whose "
            "difference is not significant.",
        ],
    )


def contenders(documents: Documents) -> dict[str, Row]:
    """Return each drafter's best chain, and the best form of each tree on EDD, by name."""
    rows: dict[str, Row | None] = {}
    for drafter, document in documents.items():
        rows[NAMES[drafter]] = first_best(row for row in document["rows"] if row["policy"] not in TREE_POLICIES)
    trees = best_by(documents[EDD]["rows"], "policy")
    rows |= {f"EDD, {TREES[name]}": trees[name] for name in ("eagle2", "pct", "vct", "hardware_pct")}
    return {
        name: {**row, "name": name if row["policy"] in TREE_POLICIES else f"{name}, {row['policy']}"}
        for name, row in rows.items()
        if row is not None
    }
