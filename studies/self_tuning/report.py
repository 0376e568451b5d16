"""The report on load: how far each rule's throughput is from an oracle's, by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specsim.report.table import Column, plain
from studies.common import Config, Document
from studies.figures import Line, line_panels
from studies.report import Report

ORACLE, OFF = "oracle", "no speculation"
DERIVED = ("tuned schedule", "budget")  # from the costs
BY_HAND = ("sglang_adaptive", "K = 3")  # whose constants know no costs
NAMED = (*DERIVED, "turbospec", "sglang_adaptive", OFF)  # in the answer
SHOWN = ("sglang_adaptive", "turbospec", "dspark", "tuned schedule", "budget")  # in the figure

Row = Mapping[str, Any]
PERCENT = plain(lambda value: f"{value:.1f}")


def report(config: Config, found: Document, profile: Document) -> Report:
    """Return the report.

    found : rows by server, trace, batch and rule, see `studies.load.run`; profile : the batch profile of the CPU
    """
    rows: Sequence[Row] = found["rows"]
    gpu, cpu = config["servers"]
    rules = [rule for rule in dict.fromkeys(row["rule"] for row in rows) if rule != ORACLE]
    summaries = [
        {"rule": rule, **summary(rows, rule, gpu["name"]), **summary(rows, rule, cpu["name"])} for rule in rules
    ]
    summaries.sort(key=lambda row: max(row[f"{server['name']}_worst"] for server in (gpu, cpu)))
    passes = {(each["server"], each["batch"]): each for each in found["passes"]}
    lags = [passes[gpu["name"], batch]["catching_up"] for batch in gpu["batches"]]
    return Report(
        question="How far from the best are the rules by which engines choose draft lengths under load?",
        answer=answer(rows, summaries, config, passes),
        figure=line_panels(
            {
                f"{server['name']}, {trace}": gap_lines(rows, server["name"], trace)
                for server in (gpu, cpu)
                for trace in config["traces"]
            },
            ("batch", "% slower than the oracle"),
            "gaps",
            level=0.0,
            log_x=True,
            rows=2,
        ),
        figure_name="gaps",
        caption="Gap to the oracle by batch, with the costs of each server and the acceptance of each trace",
        columns=[Column("rule", "rule"), *(column for server in (gpu, cpu) for column in columns(server["name"]))],
        shown=[row for row in summaries if row["rule"] != OFF],
        table=rows,
        trust=[
            f"Prompts: {', '.join(f'{count} of {trace}' for trace, count in found['sequences'].items())}, half of them "
            "for what learns, the others compared; greedy decoding. Intervals (95 %, in the full table) are over these "
            "prompts, in pairs.",
            f"Acceptance is that of the traces' own small models. Costs of the {gpu['name']} are of {gpu['target']} "
            f"with {gpu['drafter']}, from data sheets, with {gpu['engine']}'s overheads fitted to published runs, at "
            f"{gpu['context']:,} cached tokens of every request and drafts of up to {gpu['max_draft_tokens']}.",
            f"Costs of the {cpu['name']} are measured: {profile['target']} with a {cpu['drafter']}, "
            f"{profile['provenance']['device']}, {profile['provenance']['threads']} thread, "
            f"{profile['provenance']['dtype']}, {profile['repeats']} repeats, noise floor "
            f"{100 * profile['noise_floor']:.1f} %, load not recorded; at {cpu['context']} cached tokens and drafts of "
            f"up to {cpu['max_draft_tokens']}.",
            "The oracle knows what would be accepted and drafts what pays within a step; an exact programme over a "
            "whole text can be a few percent faster at batch 1, because it also chooses where rounds begin.",
            "Batches are full and prompts are not read; every rule is charged for catching up: after "
            f"{config['steps_off']} steps without speculation the first draft pass takes {lags[0]:.2f} plain steps "
            f"longer on the {gpu['name']} at batch {gpu['batches'][0]} and {lags[-1]:.2f} at batch "
            f"{gpu['batches'][-1]}. A wrong switch costs that once.",
            "SGLang's rule has its shipped constants, dspark any drafter in place of DSpark's own. EAGLE-4's rule is "
            "left out: what is published of it does not say how its tiers choose.",
        ],
    )


def columns(server: str) -> list[Column]:
    """Return a server's columns of the table."""
    return [
        Column(f"{server}: mean gap %", f"{server}_mean", PERCENT),
        Column("worst gap %", f"{server}_worst", PERCENT),
        Column("at batch", f"{server}_at"),
    ]


def summary(rows: Sequence[Row], rule: str, server: str) -> dict[str, Any]:
    """Return a rule's gaps on a server, over traces and batches."""
    mine = [row for row in rows if (row["rule"], row["server"]) == (rule, server)]
    gaps = [gap(row) for row in mine]
    worst = mine[int(np.argmax(gaps))]
    where = f"{worst['batch']} ({worst['trace']})"
    return {f"{server}_mean": float(np.mean(gaps)), f"{server}_worst": max(gaps), f"{server}_at": where}


def answer(rows: Sequence[Row], summaries: Sequence[Row], config: Config, passes: Mapping[tuple[str, int], Row]) -> str:
    """Return how far the rules are from the oracle, and from each other, on both servers."""
    gpu, cpu = config["servers"]
    shared = sorted(set(gpu["batches"]) & set(cpu["batches"]))

    def mean(server: Config, rules: Sequence[str]) -> str:
        mine = [row for row in rows if row["server"] == server["name"] and row["batch"] in shared]
        return percent(float(np.mean([gap(row) for row in mine if row["rule"] in rules])))

    def longer(server: Config) -> str:
        first, last = (passes[server["name"], batch]["five_tokens"] for batch in (shared[0], shared[-1]))
        return f"{first:.2f} to {last:.2f}"

    def named(server: Config) -> str:
        key = f"{server['name']}_mean"
        means = sorted((row for row in summaries if row["rule"] in NAMED), key=lambda row: float(row[key]))
        listed = ", ".join(f"{label(row['rule'])} {percent(row[key])}" for row in means)
        return f"{server['name']}: {listed}"

    return (
        f"At batches of {shared[0]} to {shared[-1]}, rules whose constants are set by hand ({', '.join(BY_HAND)}) are "
        f"on average {mean(gpu, BY_HAND)} slower than the oracle on the {gpu['name']} and {mean(cpu, BY_HAND)} on the "
        f"{cpu['name']}, where a pass over five tokens of each request takes {longer(cpu)} times as long as over one "
        f"({gpu['name']}: {longer(gpu)}); those derived from the costs {mean(gpu, DERIVED)} and {mean(cpu, DERIVED)}. "
        f"Over all batches, {named(gpu)}; {named(cpu)}."
    )


def gap(row: Row) -> float:
    """Return by how many percent the rule is slower than the oracle."""
    return 100 * (float(row["oracle_over_rule"]["estimate"]) - 1)


def gap_lines(rows: Sequence[Row], server: str, trace: str) -> dict[str, Line]:
    """Return the gaps of the shown rules by batch, in percent."""
    lines: dict[str, Line] = {}
    for rule in SHOWN:
        mine = [row for row in rows if (row["rule"], row["server"], row["trace"]) == (rule, server, trace)]
        gaps = [{key: 100 * (value - 1) for key, value in row["oracle_over_rule"].items()} for row in mine]
        lines[label(rule)] = ([row["batch"] for row in mine], gaps)
    return lines


def label(rule: str) -> str:
    """Return how the report calls a rule."""
    return {"budget": "budget (by cost)", "tuned schedule": "schedule tuned offline"}.get(rule, rule)


def percent(gap_percent: float) -> str:
    """Write a gap."""
    return f"{gap_percent:.1f} %"
