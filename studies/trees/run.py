"""Tree policies on the embedded lab, replayed and really run: `python -m studies.trees.run [OUT]`.

For each run of config.toml: record the lab with draft trees, validate every tree policy and a few
chains on held-out prompts (replayed and really decoded, on this machine's own costs), then a
leaderboard of all policies under those costs and two others. A second start goes on with the traces,
validations and leaderboards that are there.

Writes OUT/<run>/ (trace, profile, validation, leaderboards), OUT/figures/ and OUT/report.md, in which
every number comes from the runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from realrun.recording.record import elapsed_ratio
from specsim.cli.console import progress_bar
from specsim.cost.model import CostModel
from specsim.files import write_text
from specsim.fitting.tree_calibration import compare
from specsim.policy.base import Policy
from specsim.policy.registry import CHAIN_POLICIES, TREE_POLICIES
from specsim.progress import Progress
from specsim.ranking.document import as_document, write_results
from specsim.ranking.leaderboard import leaderboard
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import REPLAYED, Config, claim, kept, parts, run_study, validation, without_truncated
from studies.costs import PAPER, costs_of
from studies.trees import figures as drawn
from studies.trees.facts import (
    best_static,
    domain_rows,
    first,
    node_bins,
    paper_answer,
    paper_pct,
    policy_of,
    rounds_of,
    static_sizes,
    width_rows,
)
from studies.trees.text import OURS, Run, report_text

FOUND = "found.json"  # what the report shows beside the validation
RECORDED = ("config.json", f"*/{REPLAYED}", f"*/{FOUND}")
SHOWN = 6  # one dense tree in so many is drawn


def kinds_run(config: Config) -> tuple[type[Policy], ...]:
    """What is really run."""
    return (*(CHAIN_POLICIES[name] for name in config["chains"]), *TREE_POLICIES.values())


def boards_of(
    folder: Path, trace: Trace, costs: Mapping[str, CostModel], config: Config, report: Progress
) -> dict[str, dict[str, Any]]:
    """The board of every cost as a plain document; those that are there already are read."""
    found = {}
    _, holdout = parts(trace, config)
    for name, cost in costs.items():
        where = folder / name.replace(" ", "-").replace("'", "")
        if not (where / "report.html").is_file():  # which is written last
            boards = leaderboard(
                {folder.name: trace},
                [cost],
                trials=config["trials"],
                tuning_share=config["tuning_share"],
                replays=config["replay_seeds"],
                seed=config["seed"],
                sensitivity=False,
                progress=lambda what, done, total, name=name: report(f"{what}, {name}", done, total),
            )
            options = {key: config[key] for key in ("trials", "replay_seeds", "seed")}
            write_results(where, as_document(boards, {"cost": name, **options}))
        board = json.loads((where / "leaderboard.json").read_text())["boards"][0]
        found[name] = without_truncated({**board, "baseline_s": PricedTrace(holdout, cost).baseline_s.tolist()})
    return found


def found_of(folder: Path, document: Mapping[str, Any], config: Config, report: Progress) -> dict[str, Any]:
    """Everything beside the validation that the report and the figures of one run show, as plain data."""
    trace, costs = read_trace(folder / "trace"), costs_of(folder, config)
    boards = boards_of(folder, trace, costs, config, report)
    train, holdout = parts(trace, config)
    policies = {"PCT, the paper's values": paper_pct(config)}
    ours = first(boards[PAPER]["rows"], lambda row: row["policy"] == OURS)
    if ours is not None:
        policies[f"{OURS}, {PAPER}"] = policy_of(ours)
    counted = {name: [rounds_of(holdout, policy_of(row)) for row in board["rows"]] for name, board in boards.items()}
    return {
        "boards": boards,
        "rounds": {name: [asdict(one) for one in rows] for name, rows in counted.items()},
        "measured": [asdict(rounds_of(holdout, policy_of(row))) for row in document["rows"]],
        "paper": asdict(paper_answer(trace, config, costs[PAPER])),
        "widths": width_rows(trace, config),
        "domains": domain_rows(holdout, policies),
        "sizes": static_sizes(train, holdout, costs),
        "trees": best_static(boards, train),
        "calibration": compare(train, holdout),
        "bins": node_bins(holdout),
        "record_ratio": elapsed_ratio(trace),
    }


def write_figures(folder: Path, name: str, run: Run) -> None:
    """The figures of one run as SVG."""
    eagle2 = run.paper.eagle2
    line = {"label": "EAGLE-2", "nodes": eagle2.verified.estimate, "tau": eagle2.tau.estimate}
    dense, sparse = run.sizes
    figures = {
        "sizes": drawn.sizes(dense[::SHOWN], sparse, list(run.boards), name),
        "widths": drawn.widths(run.widths, line, name),
        "domains": drawn.domains(run.domains, name),
        "trees": drawn.trees(run.trees, name),
        "reliability": drawn.reliability(run.bins, name),
    }
    for kind, figure in figures.items():
        write_text(folder / f"{name}-{kind}.svg", figure)


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    runs: dict[str, Run] = {}
    for run in config["runs"]:
        name = run["name"]
        folder = out / name
        with progress_bar() as report:
            document = validation(folder, "model", kinds_run(config), run, config, report, trees=True)
            make = partial(found_of, folder, document, config, report)
            runs[name] = Run.of(document, kept(folder / FOUND, make))
        write_figures(out / "figures", name, runs[name])
        write_text(out / "report.md", report_text(config, runs))


if __name__ == "__main__":
    run_study(main, __file__)
