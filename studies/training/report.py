"""The report on training: what each part of a drafter's training is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.replaying.intervals import Estimate
from specsim.report.table import TEXT, Column
from studies.common import Config, Document
from studies.comparisons import difference_text, has_uneven_blocks
from studies.figures import Line, line_panels
from studies.paper_costs import MEASURED
from studies.report import Report
from studies.training import heads, heat
from studies.training.decoders import NO_GAIN, PAPER_SPEEDUPS
from studies.training.seeds import Seeds, share, speedup, speedup_difference, tau, tau_difference
from studies.training.sizes import EAGLE, EDD
from studies.training.trainings import NO_KL, NO_STATES, WHOLE

EXPERIMENT_OF_TABLE = {
    "EDD": (NO_STATES, NO_KL, NO_GAIN),
    "EESD": ("without early-exit layer", "without self-distillation"),
}

Row = dict[str, Any]


def report(config: Config, experiments: Mapping[str, Document]) -> Report:
    """Return the report. experiments : documents by name"""
    rows = table(config, experiments)
    shown = [shown_row(row) for row in rows if is_shown(row)]
    parts = [row for row in shown if row["method"] == "EDD"]
    losing = [f'"{row["change"]}"' for row in parts if row["difference_high"] < 0]
    sweep = experiments["decoders"]["sweep"]
    usual = config["decoders"]["usual"]
    deviating = [n for n in sweep if n != usual and tau_difference(sweep[n]["PCT"], sweep[usual]["PCT"]).high < 0]
    changed = {row["method"]: row["difference"] for row in shown}
    seeds = ", ".join(map(str, config["seeds"]))
    return Report(
        question="What does each part of a drafter's training bring?",
        answer=f"Of the changes to EDD, {', '.join(losing) or 'none'} significantly lowers its speedup. EDD accepts "
        f"longer drafts if it reads the target's states after layer {usual} of 8 than after layer "
        f"{' or '.join(map(str, deviating)) or 'none of the others'}. Training MEDUSA's first head further changes its "
        f"agreement with the target by {changed['MEDUSA']}; tuning the target for SPACE changes that of its first "
        f"mask by {changed['SPACE']}.",
        figure=line_panels({"EDD": sweep_lines(sweep)}, ("layers below the states that EDD reads",
                                                         "mean acceptance length (tau)"), "layers"),
        figure_name="layers",
        caption="Mean acceptance length by the layer whose states EDD reads, of 8 layers",
        columns=[
            Column("method", "method"),
            Column("change", "change"),
            Column("what is measured", "quantity"),
            Column("value", "value", TEXT),
            Column("difference", "difference", TEXT),
        ],
        shown=shown,
        table=rows,
        trust=[
            f"Prompts: {config['prompts']} from library files that the lab was not trained on, "
            f"{config['max_new_tokens']} tokens each. Policies that are tuned are reported on "
            f"{100 * (1 - config['tuning_share']):g} % of them.",
            f"Seeds: {seeds} for EDD, EESD and EAGLE; intervals (95 %) are of the mean over seeds and cover both seeds "
            "and prompts (Howe 1974), paired for differences. MEDUSA and SPACE: a single seed, intervals over "
            "windows of text.",
            f"Nothing was timed but cost profiles of {config['priced']} ({config['threads']} thread), "
            "so load and a noise floor were not recorded.",
            f"Trainings are short ({config['decoders']['tokens']:g} M tokens for EDD, "
            f"{config['early_exits']['tokens']:g} M for EESD): they show what differs after so many tokens.",
            *(
                [
                    "EESD's speedups and its sweep over the first N layers are withdrawn: all identity blocks stood "
                    "behind layer 4 when costs were measured."
                ]
                if has_uneven_blocks({"target": config["priced"]}, experiments["exits"])
                else []
            ),
        ],
    )  # fmt: skip


def table(config: Config, experiments: Mapping[str, Document]) -> list[Row]:
    """Return the rows of table.csv: every experiment's variants."""
    rows = []
    decoders, exits = experiments["decoders"], experiments["exits"]
    for kind in ("ablation", "tuned"):
        for costs, variants in decoders[kind].items():
            named = {"method": "EDD", "experiment": kind, "costs": costs}
            rows += seed_rows(variants, WHOLE, named, priced=True)
    for row in rows:
        if row["experiment"] == "ablation":
            row["papers_speedup"] = PAPER_SPEEDUPS[row["variant"]]
    layers = {
        f"{policy}, states after layer {n}": runs for n, by in decoders["sweep"].items() for policy, runs in by.items()
    }
    rows += seed_rows(
        layers, None, {"method": "EDD", "experiment": "layer of the states", "costs": MEASURED}, priced=True
    )
    priced = not has_uneven_blocks({"target": config["priced"]}, exits)
    named = {"method": "EESD", "experiment": "ablation", "costs": MEASURED}
    rows += seed_rows(exits["rows"], next(iter(exits["rows"])), named, priced=priced)
    for what, sweep in exits["sweeps"].items():
        if what != "N" or priced:
            variants = {f"{policy}, {what} = {n}": runs for n, by in sweep.items() for policy, runs in by.items()}
            rows += seed_rows(variants, None, {**named, "experiment": f"sweep of {what}"}, priced=priced)
    for run, lengths in experiments["sizes"]["lengths"].items():
        named = {"method": "EDD beside EAGLE", "experiment": f"of like size, {run}, K = 5"}
        rows += seed_rows(lengths, EAGLE, named, priced=False, facts=experiments["sizes"]["facts"])
    rows += [{"method": "MEDUSA", "experiment": "first head", **row} for row in heads.rows(experiments["heads"])]
    tunings = heat.rows(heat.by_tuning(experiments["heat"]))
    return rows + [{"method": "SPACE", "experiment": "tuning of the target", **row} for row in tunings]


def seed_rows(
    variants: Mapping[str, Seeds], base: str | None, named: Row, *, priced: bool, facts: Document | None = None
) -> list[Row]:
    """Return variants that were trained with several seeds, each against the base. priced : whether costs hold"""
    rows = []
    for name, runs in variants.items():
        row = {**named, "variant": name, **(facts or {}).get(name, {})}
        row |= {"rounds_truncated_percent": 100 * share(runs, "truncated", "rounds"), "tau": tau(runs).as_dict()}
        if priced:
            row["speedup"] = speedup(runs).as_dict()
        if base is not None and name != base:
            row["tau_difference"] = tau_difference(runs, variants[base]).as_dict()
            if priced:
                row["speedup_difference"] = speedup_difference(runs, variants[base]).as_dict()
        rows.append(row)
    return rows


def is_shown(row: Row) -> bool:
    """Return whether the report's table shows this row of table.csv."""
    method, variant, experiment = row["method"], row["variant"], row["experiment"]
    if method in EXPERIMENT_OF_TABLE:
        usual = row["costs"] == MEASURED and experiment == "ablation"
        return usual and variant in EXPERIMENT_OF_TABLE[method]
    return (
        (method == "EDD beside EAGLE" and variant == EDD and "greedy" in experiment)
        or (method == "MEDUSA" and variant.endswith(heads.SAME))
        or (method == "SPACE" and variant.startswith("adapter, SAR-SFT, 1 "))
    )


def shown_row(row: Row) -> Row:
    """Return a row of the report's table: a quantity of a row of table.csv and its difference."""
    quantity, key = ("mean acceptance length (tau)", "tau")
    if row["method"] == "EDD":
        quantity, key = "speedup", "speedup"
    elif row["method"] in ("MEDUSA", "SPACE"):
        quantity, key = "agreement with the target", "agreement"
    difference = Estimate(*(row[f"{key}_difference"][end] for end in ("estimate", "low", "high")))
    return {
        "method": row["method"],
        "change": row["variant"],
        "quantity": quantity,
        "value": str(Estimate(*(row[key][end] for end in ("estimate", "low", "high")))),
        "difference": difference_text(difference),
        "difference_high": difference.high,
    }


def sweep_lines(sweep: Mapping[int, Mapping[str, Seeds]]) -> dict[str, Line]:
    """Return acceptance length by layer, a line for each policy."""
    policies = next(iter(sweep.values()))
    return {
        policy: ([float(n) for n in sweep], [tau(by_policy[policy]).as_dict() for by_policy in sweep.values()])
        for policy in policies
    }
