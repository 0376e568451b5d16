"""The report's text; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from specsim.report.markdown import accuracy, ladder_table, trust_table
from specsim.report.page import comparable_text
from studies.common import Config, Document, about_machine, about_prompts
from studies.costs import PAPER, about_costs
from studies.edd import tables
from studies.edd.jobs import EDD
from studies.edd.tables import Row
from studies.words import ORDERS, Told, about_target, not_compared, order_of, told_apart

PAPER_ECE = 0.019  # figure 3b
Documents = dict[str, Document]  # by drafter


def findings(documents: Documents, rounds: dict[str, pd.DataFrame], boards: Documents) -> list[str]:
    """What one way of decoding says of the paper's claims.

    rounds : drafter -> all its real rounds; boards : by costs
    """
    edd = documents[EDD]
    usual = {name: tables.fixed(document) for name, document in documents.items()}
    chains = {name: tables.best(document, *tables.chains(document)) for name, document in documents.items()}
    trees = {name: tables.best(edd, name) for name in tables.TREES}
    best_tree = tables.best(edd, *tables.TREES)["policy"]

    def lengths_apart(a: str, b: str) -> bool:
        return tables.acceptance_lengths_apart((usual[a], rounds[a]), (usual[b], rounds[b]))

    def speeds_apart(a: str, b: str) -> bool:
        return tables.speedups_apart(documents[a], documents[b], chains[a], chains[b])

    def trees_apart(a: str, b: str) -> bool:
        return told_apart(edd, trees[a], trees[b])

    def replays_apart(board: Document, rows: Mapping[str, Row]) -> Told:
        return lambda a, b: tables.board_difference(board, rows[a], rows[b]).significant

    def estimates(rows: Mapping[str, Row], key: str) -> dict[str, float]:
        return {name: row[key]["estimate"] for name, row in rows.items()}

    apart = " ".join(comparable_text(documents))
    drafters = partial(order_of, names=tables.NAMES)
    order = partial(order_of, expected=tables.PAPER_TREES, names=tables.TREES)
    lines = [
        f"- tau at K = {tables.PAPER_K}, MEDUSA-1 at {tables.HEADS}: "
        + drafters({n: row["tau"] for n, row in usual.items()}, tables.PAPER_LENGTHS, apart=lengths_apart),
        "- Measured speedup of the best chain: "
        + (apart or drafters(estimates(chains, "measured"), tables.PAPER_SPEEDUPS, apart=speeds_apart)),
        "- Trees on EDD, measured here, each in its best form: "
        + order(estimates(trees, "measured"), apart=trees_apart),
        f"- The best chain less the best tree ({tables.TREES[best_tree]}), really run: "
        f"{tables.compared(edd, tables.chains(edd), [best_tree])}.",
    ]
    for costs, board in boards.items():
        there = {name: row for name in tables.TREES if (row := tables.top(board, name)) is not None}
        paper = {name: row for name in tables.PAPER_FORMS if (row := tables.paper_form(board, name)) is not None}
        lines += [
            f"- The trees replayed, {costs}, in the paper's settings, VCT with 10 nodes a level: "
            + order(estimates(paper, "speedup"), apart=replays_apart(board, paper)),
            "- The same, each in its best form: "
            + order(estimates(there, "speedup"), apart=replays_apart(board, there)),
        ]
    for first, second in (("pct", "eagle2"), ("hardware_pct", "pct"), ("hardware_pct", "eagle2")):
        gain = tables.compared(edd, [first], [second])
        lines.append(f"- {tables.TREES[first]} less {tables.TREES[second]}, really run: {gain}.")
    return [*lines, ""]


def calibration(document: Document) -> str:
    """How sure the drafter is and how often it is right."""
    bins = document["reliability"]
    filled = np.array(bins["count"]) > 0
    sure, right = (
        np.average(np.array(bins[key])[filled].astype(float), weights=np.array(bins["count"])[filled])
        for key in ("mean_confidence", "accept_rate")
    )
    return (
        f"EDD's confidence is calibrated with an error (ECE) of {bins['ece']:.3f}; the paper's: {PAPER_ECE}. Mean "
        f"confidence {sure:.2f}; of the tokens behind an accepted prefix {right:.2f} were accepted."
    )


def section(name: str, documents: Documents, boards: Documents, out: Path, repeats: int) -> list[str]:
    """The report on one way of decoding."""
    rounds = {drafter: pd.read_parquet(out / name / drafter / "rounds.parquet") for drafter in documents}
    edd = documents[EDD]
    return [
        f"## {name}",
        "",
        *findings(documents, rounds, boards),
        "How far to trust this:",
        "",
        *trust_table({tables.NAMES[drafter]: document for drafter, document in documents.items()}, repeats),
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
        *(line for costs, board in boards.items() for line in replayed(costs, board)),
        "### Predictions",
        "",
        *ladder_table(tables.ladder_rows(documents)),
        accuracy(row["error_percent"] for document in documents.values() for row in document["rows"]),
        "",
        calibration(edd),
        "",
        f"![Calibration](figures/calibration-{name}.svg)",
        "",
    ]


def replayed(costs: str, board: Document) -> list[str]:
    """The trees of one run at other costs."""
    return [
        f"The same trace replayed, {costs}, every policy in its best form:",
        "",
        *tables.paper_cost_table(board),
        *not_compared(board, PAPER if costs == PAPER else ""),
    ]


def report_text(
    config: Config, facts: Document, runs: dict[str, Documents], boards: dict[str, Documents], out: Path
) -> str:
    """The whole report as Markdown. facts : of the drafters' files; boards : by way of decoding and costs"""
    first = config["runs"][0]["name"]
    one = runs[first][EDD]
    steps = [document["step_ratio"] for document in runs[first].values()]
    paper = config["paper"]["s_d"] / config["paper"]["s_t"]
    lines = [
        "# EDD and candidate trees, on the lab",
        "",
        f"{about_prompts(config, one)}; {about_machine(one)}. {about_target(config)} "
        "Speedups over autoregressive decoding with 95 % intervals over sequences; a policy's best form is the one "
        "predicted fastest on the tuning prompts. alpha is the paper's, tau over the draft length (it counts the "
        "target's own token and is no rate); v_d is the share of drafted tokens that was accepted; tau the acceptance "
        "length in tokens per round. Truncated are rounds that asked for nodes that were not recorded. " + ORDERS,
        "",
        f"A draft step costs {min(steps):.3f} to {max(steps):.3f} of a target pass here, {paper:.3f} in the paper. "
        + about_costs(config),
        "",
        "## The drafters",
        "",
        *tables.training_table(runs[first], facts),
        "Each method's own structure decides its number of parameters: VDM and EDD train embedding, layer and head, "
        "EAGLE a layer and a projection below the target's own head, MEDUSA-1 a head for every place. All saw the same "
        f"text. First tokens are those accepted in {first} decoding.",
        "",
    ]
    for name, documents in runs.items():
        lines += section(name, documents, boards[name], out, config["repeats"])
    return "\n".join(lines)
