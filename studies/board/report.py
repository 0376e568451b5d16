"""The report on all drafters: which is fastest for the lab's target, at equal cost accounting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.report.page import comparable_text
from specsim.report.table import ERROR, SPEEDUP, TWO, Column
from studies.common import Config, Document, about_prompts
from studies.comparisons import ranked_rows
from studies.figures import speedup_dots
from studies.report import Report, load_line, machine_line

ERRORS = {  # of forecasts, as `realrun board` has them
    "forecast": "forecast",
    "text_known": "text known, costs from before",
    "costs_known": "text unknown, costs of the run",
    "decomposition": "both of the run",
}


def report(config: Config, boards: Mapping[str, Document]) -> Report:
    """Return the report. boards : leaderboards by way of decoding"""
    first, document = next(iter(boards.items()))
    rows = {run: board_rows(board) for run, board in boards.items()}
    shown = ranked_rows(rows, "drafter")
    leader, second, *_ = shown
    slow = [row["drafter"] for row in shown if row["measured"]["low"] <= 1]
    tied = " (the difference is not significant)" if second["tied_with_leader"] else ""
    losing = f" but {', '.join(slow)}" if slow else ""
    return Report(
        question="Which drafter is fastest for one target?",
        answer=f"In {first} decoding {leader['drafter']} is fastest at {leader['measured']['estimate']:.2f} times the "
        f"baseline (policy: {leader['form']}; forecast {leader['forecast']['estimate']:.2f}), followed by "
        f"{second['drafter']} at {second['measured']['estimate']:.2f}{tied}. All drafters{losing} are significantly "
        "faster than the baseline.",
        figure=speedup_dots(
            [(f"{row['drafter']}, {row['form']}", row) for row in rows[first]],
            "drafters",
            f"Drafters of {config['target']}, {first} decoding",
        ),
        figure_name="drafters-greedy",
        caption=f"Forecast and measured speedup of each drafter under its best policies, {first} decoding",
        columns=[
            Column("drafter", "drafter"),
            Column("policy", "form"),
            Column("mean acceptance length (tau)", "tau", TWO),
            Column(f"forecast, {first}", "forecast", SPEEDUP),
            Column(f"measured, {first}", "measured", SPEEDUP),
            Column("forecast error, %", "forecast_error_percent", ERROR),
            *(Column(f"measured, {run}", f"measured_{run}", SPEEDUP) for run in list(boards)[1:]),
        ],
        shown=shown,
        table=[csv_row(run, row) for run, run_rows in rows.items() for row in run_rows],
        trust=[
            f"Prompts: {about_prompts(config, document)}.",
            machine_line(config, document),
            load_line(boards),
            "Noise floor (A/A test, the baseline run twice): "
            + ", ".join(f"{board['noise_floor_percent']:.1f} % ({run})" for run, board in boards.items())
            + ". Intervals (95 %) are over held-out prompts; those of measured speedups hold for all rows at once.",
            *comparable_text(boards),
            "Forecasts were written before a held-out prompt was decoded. Their median errors: "
            + "; ".join(f"{run}: {errors_text(board)}" for run, board in boards.items())
            + ".",
            "The drafters are those that ship with the lab's target.",
            "Every prompt was decoded by all drafters in turns of two rounds, against the plain target's time. Of each "
            "drafter the best fixed K, adaptive chain and tree were tuned on the tuning prompts; its best on those is "
            "shown. Prompts, policies and costs are equal; what the drafters were trained on is not.",
            f"The text of {document['looping_prompts']} of {document['sequences']['holdout']} held-out prompts loops "
            "in greedy decoding, which favours prompt lookup.",
        ],
    )


def errors_text(board: Document) -> str:
    """Write the median errors of a leaderboard's forecasts."""
    medians = {name: board["errors"][key]["median_abs_percent"] for key, name in ERRORS.items()}
    return ", ".join(f"{name} {median:.1f} %" for name, median in medians.items())


def board_rows(board: Document) -> list[dict[str, Any]]:
    """Return the rows of a leaderboard with the errors of their forecasts."""
    return [
        {
            **row,
            "predicted": row["forecast"],
            "forecast_error_percent": 100 * (row["forecast"]["estimate"] / row["measured"]["estimate"] - 1),
        }
        for row in board["rows"]
    ]


def csv_row(run: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what table.csv has of a row."""
    names = ("drafter", "policy", "role", "settings", "forecast", "measured", "forecast_error_percent", "tau", "v_d")
    identical = {"rounds_identical_percent": row["rounds_identical_percent"]}
    return {"run": run, **{name: row[name] for name in names}, **identical, "without_loops": row["without_loops"]}
