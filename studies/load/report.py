"""The report on load: how far each rule's throughput is from an oracle's, by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specsim.report.table import SPEEDUP, Column, plain
from studies.common import Config, Document
from studies.figures import Line, line_panels
from studies.report import Report

ORACLE = "oracle"
DERIVED = ("tuned schedule", "budget")  # from the costs, where the others' constants are set by hand
NAMED = (*DERIVED, "turbospec", "sglang_adaptive")  # in the answer
SHOWN = ("sglang_adaptive", "turbospec", "dspark", "tetris", "tuned schedule", "budget")  # in the figure

Row = Mapping[str, Any]
PERCENT = plain(lambda value: f"{value:.1f}")


def report(config: Config, found: Document) -> Report:
    """Return the report. found : rows by trace, batch and rule, see `studies.load.run`"""
    rows: Sequence[Row] = found["rows"]
    rules = list(dict.fromkeys(row["rule"] for row in rows if row["rule"] != ORACLE))
    first = config["traces"][0]
    summaries = sorted((summary(rows, rule, config) for rule in rules), key=lambda row: float(row["worst"]))
    by_hand = [row for row in summaries if row["rule"] in config["rules"] and row["rule"] not in DERIVED]
    worst = max(by_hand, key=lambda row: row["worst"])
    means = sorted((row for row in summaries if row["rule"] in NAMED), key=lambda row: float(row["mean"]))
    sglang = next(row for row in summaries if row["rule"] == "sglang_adaptive")
    lags = {int(row["batch"]): row["steps"] for row in found["catching_up"]}
    return Report(
        question="How far from the best are the rules by which engines choose draft lengths under load?",
        answer=f"From batch {config['batches'][0]} to {config['batches'][-1]}, "
        + ", ".join(f"{name(row['rule'])} is {percent(row['mean'])}" for row in means)
        + f" slower than the oracle on average. Rules whose constants are set by hand lose where load or acceptance is "
        f"not what they were set for: sglang_adaptive {percent(sglang['worst'])} at batch {sglang['worst_batch']} "
        f"({sglang['worst_trace']}), and {worst['rule']}, the worst of all, {percent(worst['worst'])} at batch "
        f"{worst['worst_batch']} ({worst['worst_trace']}).",
        figure=line_panels(
            {trace: gap_lines(rows, trace) for trace in config["traces"]},
            ("batch", "% slower than the oracle"),
            "gaps",
            level=0.0,
            log_x=True,
        ),
        figure_name="gaps",
        caption="Gap to the oracle by batch, with the acceptance of each trace",
        columns=[
            Column("rule", "rule"),
            Column("worst gap %", "worst", PERCENT),
            Column("at batch", lambda row: f"{row['worst_batch']} ({row['worst_trace']})"),
            Column("mean gap %", "mean", PERCENT),
            *(Column(f"oracle / rule, batch {batch}, {first}", f"at_{batch}", SPEEDUP) for batch in (1, 16, 128)),
        ],
        shown=summaries[:8],
        table=rows,
        trust=[
            f"Prompts: {', '.join(f'{count} of {trace}' for trace, count in found['sequences'].items())}, half of them "
            "for what learns, the others compared; greedy decoding. Intervals (95 %) are over these prompts, in pairs.",
            f"Acceptance is that of the traces' own small models; costs are of {config['server']['target']} with "
            f"{config['server']['drafter']} on an {config['server']['hardware'].upper()}, from data sheets, with "
            f"{config['server']['engine']}'s overheads fitted to published runs, at {config['context']:,} cached "
            "tokens of every request. Nothing was run, so load and noise floor of a machine do not matter.",
            "The oracle knows what would be accepted and drafts what pays within a step; an exact programme over a "
            "whole text can be a few percent faster at batch 1, because it also chooses where rounds begin.",
            "Batches are full and prompts are not read; every rule is charged for catching up: after "
            f"{config['steps_off']} steps without speculation the first draft pass takes {lags[1]:.2f} plain steps "
            f"longer at batch 1 and {lags[max(lags)]:.2f} at batch {max(lags)}. A wrong switch costs that once.",
            "SGLang's rule has its shipped constants, dspark any drafter in place of DSpark's own. EAGLE-4's rule is "
            "left out: what is published of it does not say how its tiers choose.",
        ],
    )


def summary(rows: Sequence[Row], rule: str, config: Config) -> dict[str, Any]:
    """Return a rule's gaps over traces and batches."""
    mine = [row for row in rows if row["rule"] == rule]
    gaps = [gap(row) for row in mine]
    worst = mine[int(np.argmax(gaps))]
    first = {row["batch"]: row["oracle_over_rule"] for row in mine if row["trace"] == config["traces"][0]}
    return {
        "rule": rule,
        "worst": max(gaps),
        "worst_batch": worst["batch"],
        "worst_trace": worst["trace"],
        "mean": float(np.mean(gaps)),
        **{f"at_{batch}": first[batch] for batch in (1, 16, 128)},
    }


def gap(row: Row) -> float:
    """Return by how many percent the rule is slower than the oracle."""
    return 100 * (float(row["oracle_over_rule"]["estimate"]) - 1)


def gap_lines(rows: Sequence[Row], trace: str) -> dict[str, Line]:
    """Return the gaps of the shown rules by batch, in percent."""
    lines: dict[str, Line] = {}
    for rule in SHOWN:
        mine = [row for row in rows if row["rule"] == rule and row["trace"] == trace]
        gaps = [{key: 100 * (value - 1) for key, value in row["oracle_over_rule"].items()} for row in mine]
        lines[name(rule)] = ([row["batch"] for row in mine], gaps)
    return lines


def name(rule: str) -> str:
    """Return how the report calls a rule."""
    return {"budget": "budget (by cost)", "tuned schedule": "schedule tuned offline"}.get(rule, rule)


def percent(gap_percent: float) -> str:
    """Write a gap."""
    return f"{gap_percent:.1f} %"
