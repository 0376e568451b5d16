"""The report on SPACE: how many candidates a pass should verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.report.table import SPEEDUP, TWO, Column
from studies.common import Config, Document
from studies.comparisons import best_by, first_best, measured_gap, table_rows
from studies.figures import line_panels
from studies.report import Report, trust_lines

PAPER_K = 5  # figure 6

Row = Mapping[str, Any]


def report(config: Config, runs: Mapping[str, Document], free: Mapping[str, Document]) -> Report:
    """Return the report. runs : validations by way of decoding; free : speedups by k if all passes cost the same"""
    first, document = next(iter(runs.items()))
    rows = {run: with_free(result["rows"], free[run]) for run, result in runs.items()}
    best = max(rows[first], key=lambda row: row["measured"]["estimate"])
    tuned = first_best(ks(rows[first]))
    paper = next(row for row in ks(rows[first]) if row["params"]["k"] == PAPER_K)
    cheapest = max(free[first], key=lambda k: float(free[first][k]["estimate"]))
    assert tuned is not None
    gap = measured_gap(document, paper, tuned, f"that of k = {tuned['params']['k']}, tuned here")
    others = [run for run in runs if run != first]
    at_others = {
        run: {name: row["measured"] for name, row in best_by(run_rows, "policy_and_k").items()}
        for run, run_rows in rows.items()
    }
    shown = [
        {**row, **{f"measured_{run}": at_others[run][row["policy_and_k"]] for run in others}}
        for row in best_by(rows[first], "policy_and_k").values()
    ]
    return Report(
        question="How many candidates should SPACE verify in a pass?",
        answer=f"In {first} decoding {best['policy_and_k']} is fastest at {best['measured']['estimate']:.2f} times the "
        f"baseline; the paper's k = {PAPER_K} measures a speedup {gap}. If a pass of any size "
        f"took as long as a decode step, k = {cheapest} would be best at {free[first][cheapest]['estimate']:.2f}.",
        figure=line_panels(
            {run: lines(run_rows) for run, run_rows in rows.items()},
            ("k, candidates a pass", "speedup"),
            "k",
            level=1.0,
        ),
        figure_name="k",
        caption="Speedup by k: predicted, measured, and if every pass took as long as a decode step",
        columns=[
            Column("policy", "policy_and_k"),
            Column("tokens a pass (tau)", "tau", TWO),
            Column(f"predicted speedup, {first}", "predicted", SPEEDUP),
            Column(f"measured speedup, {first}", "measured", SPEEDUP),
            Column("if a pass took a decode step", "free", SPEEDUP),
            *(Column(f"measured, {run}", f"measured_{run}", SPEEDUP) for run in others),
        ],
        shown=shown,
        table=[
            {**line, "one_step_a_pass": row.get("free")}
            for run, run_rows in rows.items()
            for line, row in zip(table_rows(run, run_rows), run_rows, strict=True)
        ],
        trust=[
            *trust_lines(config, runs),
            "A pass of k feeds 1 + k (k + 2) tokens, which is what makes large k slow on this machine. Every k uses "
            "the first k of 5 trained masks, where the paper tunes a target for each. The baseline is the same tuned "
            "target.",
        ],
    )


def ks(rows: list[Row]) -> list[Row]:
    """Return the rows of every k, rising."""
    return sorted((row for row in rows if row["policy"] == "space_k"), key=lambda row: int(row["params"]["k"]))


def with_free(rows: list[Row], free: Document) -> list[Row]:
    """Return the rows, every k first with its speedup if all passes cost the same."""
    priced: list[Row] = [
        {**row, "free": free[str(row["params"]["k"])], "policy_and_k": f"k = {row['params']['k']}"} for row in ks(rows)
    ]
    others = [row for row in rows if row["policy"] != "space_k"]
    return [*priced, *({**row, "policy_and_k": row["policy"]} for row in others)]


def lines(rows: list[Row]) -> dict[str, tuple[list[float], list[Mapping[str, float]]]]:
    """Return the figure's lines over k."""
    at = [float(row["params"]["k"]) for row in ks(rows)]
    names = {"predicted": "predicted", "measured": "measured", "one step a pass": "free"}
    return {name: (at, [row[key] for row in ks(rows)]) for name, key in names.items()}
