"""The report's text; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from specsim.report.markdown import accuracy, verdict
from studies.common import Config, Document, about_machine, about_prompts
from studies.edd import tables
from studies.edd.jobs import EDD, HERE, NO_GAIN, NO_KL, NO_LEAVES, NO_STATES, ONE_BLOCK, PAPER, WHOLE
from studies.edd.tables import Row

PAPER_ECE = 0.019  # figure 3b
UNSURE = 0.1  # of probability, from which on a distance between confidence and truth asks for a reason
Documents = dict[str, Document]  # by drafter
Boards = dict[str, dict[str, Document]]  # by decoder and costs

# Likely reasons, told where an order is not the paper's.
WHY_DRAFTERS = (
    "Likely: EAGLE drafts with the target's own embedding and head and reads what that head reads, so that it has "
    "little to learn, while EDD learns embedding and head anew from as few tokens; what more of them would do was not "
    "tried."
)
WHY_HERE = (
    "Likely: every further node takes time on this CPU, and a tree's pass more than a chain's; tuning shrinks static "
    "trees to little more than chains."
)
WHY_THERE = (
    "Likely: at one price for a pass nothing speaks against many nodes, which CAPE and PCT save, while a pass "
    "really takes longer the more it verifies."
)


def ablation_rows(boards: Boards, costs: str) -> dict[str, Row]:
    """Table 3 at these costs: variant -> row."""
    found = {name: tables.untuned(boards[name][costs], "pct", 0.01) for name in (WHOLE, NO_STATES, NO_KL, ONE_BLOCK)}
    found[NO_GAIN] = tables.untuned(boards[WHOLE][costs], "sure_tree", 0.01)
    found[NO_LEAVES] = tables.untuned(boards[WHOLE][costs], "pct", 0.0)
    return found


def sweep_rows(boards: Boards, config: Config) -> dict[int, dict[str, Row]]:
    """Figure 5: layers below the states -> what -> row, at this machine's costs."""
    ablation = config["ablation"]
    found = {}
    for split in ablation["states_after"]:
        board = boards[WHOLE if split == ablation["usual"] else f"states {split}"][HERE]
        found[split] = {"K = 5": tables.form(board, "fixed_k", "k=5"), "PCT": tables.untuned(board, "pct", 0.01)}
    return found


def findings(documents: Documents, rounds: dict[str, pd.DataFrame], board: Document) -> list[str]:
    """What one way of decoding says of the paper's claims. rounds : drafter -> all its real rounds"""
    edd = documents[EDD]
    usual = {name: tables.fixed(document) for name, document in documents.items()}
    chains = {name: tables.best(document, *tables.chains(document)) for name, document in documents.items()}
    trees = {name: tables.best(edd, name) for name in tables.TREES}
    there = {name: row for name in tables.TREES if (row := tables.top(board, name)) is not None}
    paper = {name: tables.paper_form(board, name) for name in tables.PAPER_FORMS}
    best_tree = tables.best(edd, *tables.TREES)["policy"]

    def lengths_apart(a: str, b: str) -> bool:
        return tables.acceptance_lengths_apart((usual[a], rounds[a]), (usual[b], rounds[b]))

    def speeds_apart(a: str, b: str) -> bool:
        return tables.speedups_apart(documents[a], documents[b], chains[a], chains[b])

    def trees_apart(a: str, b: str) -> bool:
        return tables.compared(edd, [a], [b]).separated

    def replays_apart(rows: Mapping[str, Row]) -> Callable[[str, str], bool]:
        return lambda a, b: tables.board_difference(board, rows[a], rows[b]).separated

    def estimates(rows: Mapping[str, Row], key: str) -> dict[str, float]:
        return {name: row[key]["estimate"] for name, row in rows.items()}

    drafters = partial(tables.order_of, expected=tables.PAPER_DRAFTERS, names=tables.NAMES, reason=WHY_DRAFTERS)
    order = partial(tables.order_of, expected=tables.PAPER_TREES, names=tables.TREES)
    lines = [
        f"- tau at K = {tables.PAPER_K}, MEDUSA-1 at {tables.HEADS}: "
        + drafters({name: row["tau"] for name, row in usual.items()}, apart=lengths_apart),
        "- Measured speedup of the best chain: " + drafters(estimates(chains, "measured"), apart=speeds_apart),
        "- Trees on EDD, measured here, each in its best form: "
        + order(estimates(trees, "measured"), apart=trees_apart, reason=WHY_HERE),
        f"- The best chain less the best tree ({tables.TREES[best_tree]}), really run: "
        f"{verdict(tables.compared(edd, tables.chains(edd), [best_tree]))}.",
        "- The trees replayed at the paper's costs, in the paper's settings, VCT with 10 nodes a level: "
        + order(estimates(paper, "speedup"), apart=replays_apart(paper), reason=WHY_THERE),
        "- The same, each in its best form: "
        + order(estimates(there, "speedup"), apart=replays_apart(there), reason="Likely as before."),
    ]
    for first, second in (("pct", "eagle2"), ("hardware_pct", "pct"), ("hardware_pct", "eagle2")):
        gain = verdict(tables.compared(edd, [first], [second]))
        lines.append(f"- {tables.TREES[first]} less {tables.TREES[second]}, really run: {gain}.")
    return [*lines, ""]


def calibration(document: Document) -> str:
    """How sure the drafter is and how often it is right, with the likely reason where it is right much more often."""
    bins = document["reliability"]
    filled = np.array(bins["count"]) > 0
    sure, right = (
        np.average(np.array(bins[key])[filled].astype(float), weights=np.array(bins["count"])[filled])
        for key in ("mean_confidence", "accept_rate")
    )
    text = (
        f"EDD's confidence is calibrated with an error (ECE) of {bins['ece']:.3f}; the paper's: {PAPER_ECE}. Mean "
        f"confidence {sure:.2f}; of the tokens behind an accepted prefix {right:.2f} were accepted."
    )
    if right - sure < UNSURE:
        return text
    return (
        f"{text} Likely: this text repeats itself ({100 * document['distinct_trigram_share']:.0f} % of its trigrams "
        "are distinct), and what repeats is accepted more often than EDD expects."
    )


def section(name: str, documents: Documents, board: Document, out: Path) -> list[str]:
    """The report on one way of decoding."""
    rounds = {drafter: pd.read_parquet(out / name / drafter / "rounds.parquet") for drafter in documents}
    edd = documents[EDD]
    return [
        f"## {name}",
        "",
        *findings(documents, rounds, board),
        "### Drafters as chains (table 1)",
        "",
        *tables.drafters_table(documents),
        f"![Drafters](figures/drafters-{name}.svg)",
        "",
        "### Candidate trees on EDD (table 2)",
        "",
        *tables.trees_table(edd, rounds[EDD]),
        f"![Trees on EDD](figures/trees-{name}.svg)",
        "",
        "The same trace, were a draft step and a target pass as dear as the paper's, whatever the pass holds; every "
        f"policy's best form of those that verify up to {tables.MOST_NODES} nodes on average. Truncated are rounds "
        "that asked for more nodes than were recorded: such speedups are lower bounds.",
        "",
        *tables.paper_cost_table(board),
        f"Larger, and left out: {tables.too_large(board)}.",
        "",
        accuracy(row["error_percent"] for document in documents.values() for row in document["rows"]),
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
    steps = [document["step_ratio"] for document in runs[first].values()]
    paper = config["paper"]["s_d"] / config["paper"]["s_t"]
    lines = [
        "# EDD and candidate trees, on the lab",
        "",
        f"{about_prompts(config, one)}; {about_machine(one)}. "
        "Speedups over autoregressive decoding with 95 % intervals over sequences; a policy's best form is the one "
        "predicted fastest on the tuning prompts. alpha is the paper's, tau over the draft length (it counts the "
        "target's own token and is no rate); v_d is the share of drafted tokens that was accepted; tau the acceptance "
        "length in tokens per round. In an order, < stands between what the prompts tell apart, ~ where they do not.",
        "",
        f"The target has {one['facts']['target']['layers']} layers, so that a draft step costs {min(steps):.3f} to "
        f"{max(steps):.3f} of a target pass where the paper's costs {paper:.3f}, and on this CPU every further token "
        "in a verification pass costs time. Hence the replays at the paper's costs.",
        "",
        "## The drafters",
        "",
        *tables.training_table(runs[first]),
        "Each method's own structure decides its number of parameters: VDM and EDD train embedding, layer and head, "
        "EAGLE a layer and a projection below the target's own head, MEDUSA-1 a head for every place. All saw the same "
        f"text. First tokens are those accepted in {first} decoding.",
        "",
    ]
    for name, documents in runs.items():
        lines += section(name, documents, boards[name], out)
    lines += [
        f"## Taken apart, {first}",
        "",
        f"Decoders trained alike for this table, {config['ablation']['tokens']:g} M tokens each; replayed on the same "
        "prompts under PCT as the paper runs it (width 5, depth 10, leaves below 0.01 dropped, s_d / s_t of the "
        "costs). Without expected time gain: a node's own confidence against the same threshold. All are priced by "
        "EDD's profile.",
        "",
    ]
    for costs, remark in ((HERE, ""), (PAPER, ", where a pass has one price and a leaf that is kept costs nothing")):
        board = variants[WHOLE][costs]
        lines += [f"At {costs}{remark}:", "", *tables.ablation_table(ablation_rows(variants, costs), board)]
    usual = config["ablation"]["usual"]
    lines += [
        "The layer whose states are read (figure 5, where the fourth-to-last of 32 is best), at this machine's costs:",
        "",
        *tables.sweep_table(sweep_rows(variants, config), usual, variants[WHOLE][HERE]),
        "![Layers](figures/layers.svg)",
        "",
    ]
    return "\n".join(lines)
