"""Chain policies on the embedded lab, replayed and really run: `python -m studies.chain_policies.run [OUT]`.

For each run of config.toml: record the lab, validate every policy on held-out prompts (replayed
and really decoded, on this machine's own costs), then a leaderboard per maximal draft length
under those costs and under a cheaper drafter. A second start goes on with the traces that are there.

Writes OUT/<run>/ (trace, profile, validation, leaderboards) and OUT/report.md, in which every number
comes from the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.cli.console import progress_bar
from specsim.cost.files import read_cost
from specsim.cost.model import ConstantCost, CostModel
from specsim.files import write_text
from specsim.policy.registry import CHAIN_POLICIES
from specsim.ranking.document import as_document, write_results
from specsim.ranking.leaderboard import Board, leaderboard
from specsim.report.markdown import ladder_table, markdown_table, trust_table
from specsim.speedup.intervals import interval_text
from specsim.trace.files import read_trace
from studies.chain_policies.questions import best, lambda_loss, questions, rule_order
from studies.common import VALIDATED, Config, Document, about_machine, about_prompts, claim, run_study, validation
from studies.words import ORDERS, about_target, measured_verdict

RECORDED = ("config.json", *(f"*/{name}" for name in VALIDATED))
MEASURED, CHEAP = "measured costs", "cheap drafter"
LAMBDA = ("adaedl, dynamic", "max_confidence, dynamic")


def boards_of(folder: Path, config: Config, report: Any) -> dict[str, list[Board]]:
    """Leaderboards of one run by cost, one per maximal draft length; writes their reports."""
    trace = read_trace(folder / "trace")
    costs: dict[str, CostModel] = {
        MEASURED: read_cost(folder / "profile.json"),
        CHEAP: ConstantCost(config["cost_ratio"] * 1e-2, 1e-2),
    }
    found = {}
    for name, cost in costs.items():
        found[name] = leaderboard(
            {folder.name: trace},
            [cost],
            kinds=list(CHAIN_POLICIES.values()),
            max_drafts=config["max_drafts"],
            trials=config["trials"],
            tuning_share=config["tuning_share"],
            replays=config["replay_seeds"],
            seed=config["seed"],
            progress=report,
        )
        options = {"cost": name, "trials": config["trials"], "seeds": config["replay_seeds"], "seed": config["seed"]}
        write_results(folder / name.replace(" ", "-"), as_document(found[name], options))
    return found


def board_section(board: Board) -> list[str]:
    """Ranking and questions of one board."""
    rows = [
        [
            r.label,
            interval_text(r.prediction.speedup.as_dict()),
            "not significant" if r.tied else "",
            f"{r.prediction.v_d:.3f}",
            f"{r.prediction.r_d:.3f}",
            f"{r.prediction.tau:.2f}",
            f"{r.mean_length:.2f}",
            f"{100 * r.prediction.oracle_regret:.1f} %",
        ]
        for r in board.rows
    ]
    oracle = ["oracle", interval_text(board.oracle.as_dict()), *[""] * 5, "0.0 %"]
    columns = ["policy", "speedup", "difference to the first", "v_d", "r_d", "tau", "mean draft", "regret"]
    return [
        *markdown_table(columns, [oracle, *rows]),
        *markdown_table(["question (difference of speedups, paired)", "answer"], questions(board)),
    ]


def length_section(boards: Mapping[str, list[Board]]) -> list[str]:
    """Speedup of each rule's best form by maximal draft length and run, their order, and what a wrong lambda costs."""
    lines = []
    kinds = ("fixed_k", "max_confidence", "adaedl", "renewal_stop")
    rows = []
    for run, list_of in boards.items():
        for board in list_of:
            forms = [best(board, kind) for kind in kinds]
            cells = [f"{r.prediction.speedup.estimate:.3f}" if r else "" for r in forms]
            losses = [lambda_loss(board, label) for label in LAMBDA]
            shown = ["" if loss is None else f"{loss:.1f} %" for loss in losses]
            rows.append([run, str(board.max_draft), *cells, rule_order(board), *shown])
    columns = ["run", "D", "Base-SPD, best K", "Max-Confidence", "AdaEDL", "RenewalStop"]
    columns += ["order, AdaEDL's table 1 (as in 8 of its 9 cells)"]
    columns += ["AdaEDL: mean loss over lambda", "Max-Confidence: mean loss over lambda"]
    lines += markdown_table(columns, rows)
    return lines


def measured_section(document: Mapping[str, Any]) -> list[str]:
    """Predicted beside measured, and RenewalStop's measured difference to every other policy."""
    rows = document["rows"]
    renewal = next(r for r in rows if r["policy"] == "renewal_stop" and r["params"]["lookahead"])
    cells = []
    for r in rows:
        ahead = ""
        if r is not renewal:
            ahead = measured_verdict(document, renewal, r)
        cells.append(
            [
                f"{r['label']} ({r['role']})",
                interval_text(r["predicted"]),
                interval_text(r["measured"]),
                f"{r['error_percent']:+.1f}",
                f"{r['rounds_identical_percent']:.2f}",
                ahead,
            ]
        )
    columns = [
        "policy",
        "from own rounds",
        "measured",
        "error %",
        "rounds identical %",
        "RenewalStop less this, measured",
    ]
    return [
        *markdown_table(columns, cells),
        *ladder_table((r["label"], r) for r in rows),
    ]


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    kinds = [kind for name, kind in CHAIN_POLICIES.items() if name not in config["left_out"]]
    documents: dict[str, Document] = {}
    boards: dict[str, dict[str, list[Board]]] = {}
    for run in config["runs"]:
        folder = out / run["name"]
        with progress_bar() as report:
            documents[run["name"]] = validation(folder, "model", kinds, run, config, report)
            boards[run["name"]] = boards_of(folder, config, report)
        write_text(out / "report.md", report_text(config, documents, boards))


def report_text(
    config: Mapping[str, Any],
    documents: Mapping[str, Mapping[str, Any]],
    boards: Mapping[str, Mapping[str, list[Board]]],
) -> str:
    """The study's report as Markdown."""
    first = next(iter(documents.values()))
    lines = [
        "# Chain policies on the lab",
        "",
        f"{about_prompts(config, first)}; {about_machine(first)}. {about_target(config)} "
        "Speedups with 95 % intervals over sequences; differences are paired. "
        "Where the best of several policies or forms is named, it was picked on the tuning sequences; the first row of "
        f"a board did best on the reported ones, which flatters it. {ORDERS} "
        f'"{CHEAP}" sets s_d / s_t to {config["cost_ratio"]} and everything else to nothing.',
        "",
        "## How far to trust this",
        "",
        *trust_table(documents, config["repeats"]),
        "## By maximal draft length D",
        "",
    ]
    for cost in (MEASURED, CHEAP):
        lines += [f"### {cost}", "", *length_section({run: found[cost] for run, found in boards.items()})]
    for run, found in boards.items():
        lines += [f"## {run}: really run", "", *measured_section(documents[run])]
        for cost, list_of in found.items():
            deepest = max(list_of, key=lambda board: board.max_draft)
            lines += [f"## {run}: replayed, {cost}, D = {deepest.max_draft}", "", *board_section(deepest)]
    return "\n".join(lines)


if __name__ == "__main__":
    run_study(main, __file__)
