"""EDD beside VDM, MEDUSA-1 and EAGLE, and candidate trees on EDD, on the lab: `python studies/edd/run.py [OUT]`.

Trains VDM and the decoders of the ablation and the sweep, validates every drafter of config.toml (recorded,
profiled, tuned, predicted, really decoded on this machine), and replays what was recorded at the paper's
costs as well. A second start goes on with what is there.

Writes OUT/figures/ and OUT/report.md, in which every number comes from the runs.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import figures
import jobs
import numpy as np
import pandas as pd
import tables
from jobs import EDD, HERE, NO_GAIN, NO_LEAVES, NO_STATES, WHOLE, Config

from specsim.console import progress_bar
from specsim.errors import InputError
from specsim.policy import FixedK
from specsim.report.figures import reliability_diagram
from specsim.report.markdown import verdict
from specsim.report.page import write_whole

FOLDER = Path(__file__).parent
Documents = dict[str, jobs.Document]
Boards = dict[str, dict[str, jobs.Document]]


# Likely reasons, told where an order is not the paper's.
WHY_DRAFTERS = (
    "Likely: EAGLE's first row is fused with the true feature that produced the pending token, while EDD sees states "
    "of the tokens before only, three layers below the last, which is far in a target of 8."
)
WHY_HERE = (
    "Likely: every further node takes time on this CPU, so that what verifies few nodes leads, and tuning shrinks "
    "static trees to little more than chains."
)
WHY_UNSURE = (
    "Likely: EDD learns the target's distribution at temperature 1, and a greedy target takes its likeliest token "
    "however unlikely, so that much of what EDD is not sure of is accepted."
)
WHY_THERE = (
    "Likely: at one price for a pass nothing speaks against many nodes, which CAPE and PCT save, while a pass "
    "really takes longer the more it verifies."
)


def ablation_rows(boards: Boards) -> dict[str, dict[str, tables.Row]]:
    """Table 3: variant -> costs -> row."""
    found: dict[str, dict[str, Any]] = {}
    for name in (WHOLE, NO_STATES, jobs.NO_KL, jobs.ONE_BLOCK):
        found[name] = {costs: tables.untuned(board, "pct", 0.01) for costs, board in boards[name].items()}
    whole = boards[WHOLE]
    found[NO_GAIN] = {costs: tables.form(board, "sure_tree") for costs, board in whole.items()}
    found[NO_LEAVES] = {costs: tables.untuned(board, "pct", 0.0) for costs, board in whole.items()}
    return found


def sweep_rows(boards: Boards, config: Config) -> dict[int, dict[str, tables.Row]]:
    """Figure 5: layers below the states -> what -> row, at this machine's costs."""
    ablation = config["ablation"]
    found = {}
    for split in ablation["states_after"]:
        board = boards[WHOLE if split == ablation["usual"] else f"states {split}"][HERE]
        found[split] = {"K = 5": tables.form(board, "fixed_k", "k=5"), "PCT": tables.untuned(board, "pct", 0.01)}
    return found


def findings(documents: Documents, board: jobs.Document) -> list[str]:
    """What one way of decoding says of the paper's claims."""
    taus = {drafter: tables.fixed(document)["tau"] for drafter, document in documents.items()}
    edd, lines = documents[EDD], []
    order = tables.order_of(taus, tables.PAPER_DRAFTERS, tables.NAMES, WHY_DRAFTERS)
    lines.append(f"- tau at the paper's draft length: {order}")
    here = {name: row["measured"]["estimate"] for name in tables.TREES if (row := tables.best(edd, name)) is not None}
    there = {name: row["speedup"]["estimate"] for name in tables.TREES if (row := tables.top(board, name)) is not None}
    order = tables.order_of(here, tables.PAPER_TREES, tables.TREES, WHY_HERE)
    lines.append(f"- Trees on EDD, measured here, each in its best form: {order}")
    usual = {name: tables.paper_form(board, name)["speedup"]["estimate"] for name in tables.PAPER_FORMS}
    order = tables.order_of(usual, tables.PAPER_TREES, tables.TREES, WHY_THERE)
    lines.append(f"- The same, replayed at the paper's costs, in the paper's settings: {order}")
    order = tables.order_of(there, tables.PAPER_TREES, tables.TREES, "Likely as before.")
    lines.append(f"- The same, each in its best form: {order}")
    for first, second in (("pct", "eagle2"), ("hardware_pct", "pct"), ("hardware_pct", "eagle2")):
        gain = verdict(tables.compared(edd, first, second))
        lines.append(f"- {tables.TREES[first]} less {tables.TREES[second]}, really run: {gain}.")
    return [*lines, ""]


def calibration(document: jobs.Document) -> str:
    """How sure the drafter is and how often it is right, with the likely reason where that is due to greed."""
    bins = document["reliability"]
    sure, right = (np.average(bins[key], weights=bins["count"]) for key in ("mean_confidence", "accept_rate"))
    text = (
        f"EDD's confidence is calibrated with an error (ECE) of {bins['ece']:.3f}; the paper's: 0.019. Mean confidence "
        f"{sure:.2f}, share accepted {right:.2f}."
    )
    greedy = document["decoding"]["mode"] == "greedy"
    return f"{text} {WHY_UNSURE}" if greedy and right > sure else text


def section(name: str, documents: Documents, board: jobs.Document, out: Path) -> list[str]:
    """The report on one way of decoding."""
    edd, rounds = documents[EDD], pd.read_parquet(out / name / EDD / "rounds.parquet")
    error = tables.median_error_percent(list(documents.values()))
    met = "met" if error <= tables.TARGET_PERCENT else "missed"
    return [
        f"## {name}",
        "",
        *findings(documents, board),
        "### Drafters as chains (table 1)",
        "",
        *tables.drafters_table(documents),
        f"![Drafters](figures/drafters-{name}.svg)",
        "",
        "### Candidate trees on EDD (table 2)",
        "",
        *tables.trees_table(edd, rounds),
        f"![Trees on EDD](figures/trees-{name}.svg)",
        "",
        f"The same trace, were a draft step and a target pass of up to {tables.MOST_NODES} nodes as dear as the "
        "paper's; every policy's best form:",
        "",
        *tables.paper_cost_table(board),
        f"Median error of all predictions: {error:.2f} % (target {tables.TARGET_PERCENT:g} %: {met}).",
        "",
        calibration(edd),
        "",
        f"![Calibration](figures/calibration-{name}.svg)",
        "",
    ]


def report_text(config: Config, runs: dict[str, Documents], boards: Documents, variants: Boards, out: Path) -> str:
    """The whole report as Markdown."""
    first = config["runs"][0]["name"]
    one = runs[first][EDD]
    environment = one["environment"]
    depth = one["facts"]["target"]["layers"]
    lines = [
        "# EDD and candidate trees, on the lab",
        "",
        f"{config['prompts']} prompts from library files that the lab was not trained on, {config['max_new_tokens']} "
        f"tokens each, {one['sequences']['tuning']} to tune on and {one['sequences']['holdout']} to report on; "
        f"{environment['device']}, {environment['threads']} thread, {one['dtype']}, {environment['date'][:10]}. "
        "Speedups over autoregressive decoding with 95 % intervals over sequences. alpha is the paper's, tau over the "
        "draft length (it counts the target's own token and is no rate); v_d is the share of drafted tokens that was "
        "accepted; tau the acceptance length in tokens per round.",
        "",
        f"The target has {depth} layers, so that one layer that drafts costs an eighth of it and more where the "
        "papers' costs a thirtieth, and on this CPU every further token in a verification pass costs time. Hence the "
        "replays at the paper's costs.",
        "",
        "## The drafters",
        "",
        *tables.training_table(runs[first]),
        "Each method's own structure decides its number of parameters: VDM and EDD train embedding, layer and head, "
        "EAGLE a layer and a projection below the target's own head, MEDUSA-1 a head for every place. All saw the same "
        "text.",
        "",
    ]
    for name, documents in runs.items():
        lines += section(name, documents, boards[name], out)
    lines += [
        f"## Taken apart, {first}",
        "",
        f"Decoders trained alike for this table, {config['ablation']['tokens']:g} M tokens each; replayed on the same "
        "prompts under PCT as the paper runs it (width 5, depth 10, leaves below 0.01 dropped, s_d / s_t of the "
        f"costs). Without expected time gain: a node's own confidence against a threshold (table 3), "
        "tuned on this trace as the other rows are not; at this machine's costs "
        f"{tables.form(variants[WHOLE][HERE], 'sure_tree')['settings']}.",
        "",
        *tables.ablation_table(ablation_rows(variants)),
        "The layer whose states are read (figure 5); all have the same structure and one price:",
        "",
        *tables.sweep_table(sweep_rows(variants, config)),
        "![Layers](figures/layers.svg)",
        "",
    ]
    return "\n".join(lines)


def short(row: tables.Row) -> str:
    """A row's name in a figure: the table has its settings."""
    return row["label"] if row["policy"] == FixedK.name else f"{row['policy']}, {row['role']}"


def write_figures(folder: Path, config: Config, runs: dict[str, Documents], variants: Boards) -> None:
    """All figures as SVG."""
    for name, documents in runs.items():
        points = []
        for drafter, document in documents.items():
            top = tables.best(document, *tables.chains(document))
            assert top is not None
            points += [(f"{tables.NAMES[drafter]}, {short(row)}", row) for row in (tables.fixed(document), top)]
        write_whole(folder / f"drafters-{name}.svg", figures.speedups(points, f"drafters-{name}", "Drafters as chains"))
        trees = [
            (f"{tables.TREES[row['policy']]}, {row['role']}", row)
            for row in documents[EDD]["rows"]
            if row["policy"] in tables.TREES
        ]
        write_whole(folder / f"trees-{name}.svg", figures.speedups(trees, f"trees-{name}", "Candidate trees on EDD"))
        write_whole(folder / f"calibration-{name}.svg", reliability_diagram(documents[EDD]["reliability"]))
    write_whole(folder / "layers.svg", figures.sweep(sweep_rows(variants, config)))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    out.mkdir(parents=True, exist_ok=True)
    used = out / "config.json"
    if used.is_file() and json.loads(used.read_text()) != config:
        raise InputError(f"{out} holds results of another configuration; give another folder")
    write_whole(used, json.dumps(config, indent=2) + "\n")
    with progress_bar() as report:
        folders = jobs.trained(out, config, report)
        runs = {run["name"]: jobs.main_jobs(out, run, config, folders, report) for run in config["runs"]}
        boards = {run["name"]: jobs.tree_boards(out, run, config, report) for run in config["runs"]}
        variants = jobs.variants(out, config, folders, report)
    write_figures(out / "figures", config, runs, variants)
    write_whole(out / "report.md", report_text(config, runs, boards, variants, out))


if __name__ == "__main__":
    main(
        Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "out",
        tomllib.loads((FOLDER / "config.toml").read_text()),
    )
