"""The report on all drafters: which is fastest for one real language model, at equal cost accounting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.lab_drafters import SHIPPED
from specsim.report.leaderboard_figures import drafters
from specsim.report.table import ERROR, SPEEDUP, TWO, Column
from studies.common import Config, Document
from studies.comparisons import ranked_rows, table_rows
from studies.report import Report, trust_lines


def report(config: Config, boards: Mapping[str, Document]) -> Report:
    """Return the report. boards : leaderboards by way of decoding"""
    first, document = next(iter(boards.items()))
    rows = {run: [forecast_row(row) for row in board["rows"]] for run, board in boards.items()}
    shown = ranked_rows(rows, "drafter")
    leader, second, *_ = shown
    faster = [row["drafter"] for row in shown if row["measured"]["low"] > 1]
    kinds = by_kind(leader, document)
    training = read_drafter(SHIPPED / config["target"] / "eagle").facts
    least, most = min(kinds, key=kinds.__getitem__), max(kinds, key=kinds.__getitem__)
    return Report(
        question="Which drafter is fastest for SmolLM2 on a CPU?",
        answer=f"In {first} decoding {leader['drafter']} is fastest at {leader['measured']['estimate']:.2f} times the "
        f"baseline (policy: {leader['form']}; forecast {leader['predicted']['estimate']:.2f}), followed by "
        f"{second['drafter']} at {second['measured']['estimate']:.2f}. By kind of task it reaches {kinds[least]:.2f} "
        f"({least}) to {kinds[most]:.2f} times ({most}), and significantly faster than the baseline "
        f"{'is' if len(faster) == 1 else 'are'} {' and '.join(faster) or 'no drafter'}.",
        figure=drafters(rows[first]),
        figure_name="drafters-greedy",
        caption=f"Replayed and measured speedup of each drafter under its best policies, {first} decoding",
        columns=[
            Column("drafter", "drafter"),
            Column("policy", "form"),
            Column("mean acceptance length (tau)", "tau", TWO),
            Column("forecast", "predicted", SPEEDUP),
            Column("measured", "measured", SPEEDUP),
            Column("forecast error, %", "error_percent", ERROR),
        ],
        shown=shown,
        table=[line for run, run_rows in rows.items() for line in csv_rows(run, run_rows, boards[run])],
        trust=[
            *trust_lines(config, boards),
            "The forecast was written before any held-out prompt was decoded, from the tuning prompts and costs that "
            "all drafters were profiled for in turns. Every prompt was decoded by all drafters in turns of two rounds.",
            "Of each drafter the best fixed K, adaptive chain and tree were tuned on the tuning prompts; its best on "
            "those is shown. The trained drafters had the same text, "
            f"{training['text']['generated_tokens'] / 1e6:.1f} million tokens of questions and the target's answers, "
            f"and the same time, {training['seconds'] / 60:.1f} minutes on an {training['provenance']['device']} that "
            "they shared; their papers train longer.",
            f"The text of {document['looping_prompts']} of {document['sequences']['holdout']} held-out prompts loops "
            "in greedy decoding, which favours prompt lookup.",
        ],
    )


def forecast_row(row: Document) -> Document:
    """Return a row with its forecast as what was predicted, and the error of that."""
    predicted = row["forecast"]
    error = 100 * (predicted["estimate"] / row["measured"]["estimate"] - 1)
    return {**row, "predicted": predicted, "error_percent": error}


def by_kind(row: Document, board: Document) -> dict[str, float]:
    """Compute a row's measured speedup on each kind of task."""
    kinds = np.array(board["domains"])
    own, baseline = (np.array(seconds) for seconds in (row["sequence_seconds"], board["baseline_sequence_seconds"]))
    return {str(kind): float(baseline[kinds == kind].sum() / own[kinds == kind].sum()) for kind in np.unique(kinds)}


def csv_rows(run: str, rows: list[Document], board: Document) -> list[Mapping[str, object]]:
    """Return the rows of table.csv of a run, with the measured speedup on each kind of task."""
    return [
        {
            **table_rows(run, [row], drafter=row["drafter"])[0],
            "without_loops": row["without_loops"],
            **{f"measured_{kind}": speedup for kind, speedup in by_kind(row, board).items()},
        }
        for row in rows
    ]
