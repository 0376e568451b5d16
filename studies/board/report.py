"""The report on all drafters: which is fastest for the lab's target, at equal cost accounting."""

from __future__ import annotations

from collections.abc import Mapping

from specsim.report.leaderboard_figures import drafters
from specsim.report.table import Column
from studies.common import Config, Document
from studies.comparisons import (
    WITHDRAWN,
    has_uneven_blocks,
    measured_columns,
    ranked_rows,
    table_rows,
    without_withdrawn,
)
from studies.report import Report, trust_lines


def report(config: Config, boards: Mapping[str, Document]) -> Report:
    """Return the report. boards : leaderboards by way of decoding"""
    first, document = next(iter(boards.items()))
    rows = {
        run: [{**row, "predicted": row["speedup"]} for row in without_withdrawn(config, board)["rows"]]
        for run, board in boards.items()
    }
    shown = ranked_rows(rows, "drafter")
    leader, second, *_ = shown
    slow = [row["drafter"] for row in shown if row["measured"]["low"] <= 1]
    losing = f" but {', '.join(slow)}" if slow else ""
    return Report(
        question="Which drafter is fastest for one target?",
        answer=f"In {first} decoding {leader['drafter']} is fastest at {leader['measured']['estimate']:.2f} times the "
        f"baseline (policy: {leader['form']}), followed by {second['drafter']} at "
        f"{second['measured']['estimate']:.2f}. All drafters{losing} are significantly faster than the baseline.",
        figure=drafters(rows[first]),
        figure_name="drafters-greedy",
        caption=f"Predicted and measured speedup of each drafter under its best policies, {first} decoding",
        columns=measured_columns([Column("drafter", "drafter"), Column("policy", "form")], list(boards)),
        shown=shown,
        table=[line for run, run_rows in rows.items() for line in csv_rows(run, run_rows)],
        trust=[
            *trust_lines(config, boards),
            "Every prompt was decoded by all drafters in turns of two rounds, against the plain target's time. Of each "
            "drafter the best fixed K, adaptive chain and tree were tuned on the tuning prompts; its best on those is "
            "shown. Prompts, policies and costs are equal; what the drafters were trained on is not.",
            f"The text of {document['looping_prompts']} of {document['sequences']['holdout']} held-out prompts loops "
            "in greedy decoding, which favours prompt lookup.",
            *([WITHDRAWN] if has_uneven_blocks(config, document) else []),
        ],
    )


def csv_rows(run: str, rows: list[Document]) -> list[Mapping[str, object]]:
    """Return the rows of table.csv of a run."""
    return [
        {**table_rows(run, [row], drafter=row["drafter"])[0], "without_loops": row["without_loops"]} for row in rows
    ]
