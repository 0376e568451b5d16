"""The report on draft trees: whether they beat chains, and which does."""

from __future__ import annotations

from collections.abc import Mapping

from specsim.policy.registry import CHAIN_POLICIES, TREE_POLICIES
from specsim.report.table import Column
from studies.common import Config, Document
from studies.comparisons import (
    board_rows,
    differ_measured,
    first_best,
    form,
    measured_columns,
    measured_difference,
    measured_gap,
    ranked_rows,
    table_rows,
)
from studies.figures import speedup_dots
from studies.report import Report, trust_lines
from studies.trees.paper import PaperComparison


def report(config: Config, runs: Mapping[str, Document], replayed: Mapping[str, Document]) -> Report:
    """Return the report. runs : validations by way of decoding; replayed : leaderboards by cost, PCT beside EAGLE-2"""
    first, document = next(iter(runs.items()))
    tree, chain = (
        first_best(row for row in document["rows"] if row["policy"] in kinds)
        for kinds in (TREE_POLICIES, CHAIN_POLICIES)
    )
    assert tree is not None and chain is not None
    faster = differ_measured(document, tree, chain) and measured_difference(document, tree, chain).difference.low > 0
    gap = measured_gap(document, tree, chain, f"that of the best chain ({form(chain)})")
    paper = PaperComparison.from_document(replayed[first]["paper"])
    shown = ranked_rows({run: result["rows"] for run, result in runs.items()}, "policy")
    return Report(
        question="Do draft trees beat chains?",
        answer=f"{'Yes' if faster else 'No'}: in {first} decoding the best tree ({form(tree)}) measures a speedup "
        f"{gap}. {paper.text} The paper reports about half the nodes at a comparable acceptance length.",
        figure=speedup_dots([(form(row), row) for row in shown], "policies", "Speedup of trees and chains"),
        figure_name="policies",
        caption=f"Predicted and measured speedup of each policy in its best form, {first} decoding",
        columns=measured_columns([Column("policy", form)], list(runs)),
        shown=shown,
        table=[
            *(row for run, result in runs.items() for row in table_rows(run, result["rows"], costs="measured costs")),
            *(
                row
                for run, result in replayed.items()
                for costs, rows in result["boards"].items()
                for row in board_rows(run, {"rows": rows}, costs=f"{costs}, replayed only")
            ),
        ],
        trust=[
            *trust_lines(config, runs),
            f"{config['tree_nodes']} nodes were recorded per position, {config['tree_width']} children wide and "
            f"{config['depth']} deep; policies that ask for more in over 5 % of their rounds are left out of replays.",
            "On this CPU each verified token costs time, which favours chains. table.csv has all policies replayed at "
            "the costs of the PCT paper (7B on an A6000) and of a GPU whose passes are flat up to 32 tokens.",
        ],
    )
