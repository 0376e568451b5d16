"""The report on chain policies: which is fastest on the lab."""

from __future__ import annotations

from collections.abc import Mapping

from specsim.report.table import Column
from studies.common import Config, Document
from studies.comparisons import (
    best_by,
    differ_measured,
    form,
    measured_columns,
    measured_gap,
    order_of,
    ranked_rows,
    table_rows,
)
from studies.figures import speedup_dots
from studies.report import Report, trust_lines

RULES = {"fixed_k": "fixed K", "max_confidence": "Max-Confidence", "adaedl": "AdaEDL"}  # rising in AdaEDL's table 1


def report(config: Config, runs: Mapping[str, Document]) -> Report:
    """Return the report. runs : validations by way of decoding"""
    first, document = next(iter(runs.items()))
    best = best_by(document["rows"], "policy")
    shown = ranked_rows({run: result["rows"] for run, result in runs.items()}, "policy")
    leader = best[shown[0]["policy"]]
    order = order_of(
        {name: best[name]["measured"]["estimate"] for name in RULES},
        list(RULES),
        RULES,
        lambda a, b: differ_measured(document, best[a], best[b]),
    )
    gap = measured_gap(document, leader, best["fixed_k"], "that of the best fixed K")
    return Report(
        question="Which chain policy is fastest?",
        answer=f"In {first} decoding {leader['policy']} is fastest: its speedup is "
        f"{leader['measured']['estimate']:.2f}, {gap}. By measured speedup, the policies of AdaEDL's "
        f"table 1 rank {order}.",
        figure=speedup_dots([(form(row), row) for row in shown], "policies", "Speedup of chain policies"),
        figure_name="policies",
        caption=f"Predicted and measured speedup of each policy in its best form, {first} decoding",
        columns=measured_columns([Column("policy", form)], list(runs)),
        shown=shown,
        table=[row for run, result in runs.items() for row in table_rows(run, result["rows"])],
        trust=[
            *trust_lines(config, runs),
            "Each policy is shown in the form that was best on the tuning prompts of each run. Predicted speedups are "
            "replayed at the costs of the run's own rounds.",
        ],
    )
