"""Tree policies on the embedded lab, replayed and really run: `python -m studies trees`.

For each run of config.toml: record the lab with draft trees, validate every tree policy and a few chains on held-out
prompts (replayed and really decoded, on this machine's own costs), then rank all policies under those costs and two
others. A second start goes on with the traces, validations and leaderboards that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from specsim.cli.console import progress_bar
from specsim.compare.leaderboard import leaderboards
from specsim.cost.model import CostModel
from specsim.io.progress import Progress
from specsim.policy.base import Policy
from specsim.policy.registry import CHAIN_POLICIES, TREE_POLICIES
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import MOST_TRUNCATED, REPLAYED, Config, cached, claim, run_title, validation
from studies.paper_costs import costs_of
from studies.trees.paper import PaperComparison
from studies.trees.report import report

FOUND = "found.json"  # leaderboards by cost, and the paper's comparison
RECORDED = ("config.json", f"*/{REPLAYED}", f"*/{FOUND}")
KEPT = ("label", "policy", "speedup", "tau", "v_d", "train_speedup", "truncated_share", "oracle_regret")


def kinds_run(config: Config) -> tuple[type[Policy], ...]:
    """Return what is really run."""
    return (*(CHAIN_POLICIES[name] for name in config["chains"]), *TREE_POLICIES.values())


def boards_of(
    trace: Trace, costs: Mapping[str, CostModel], config: Config, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """Return the ranking at every cost, without rows whose rounds the record truncates too often."""
    boards = {}
    for name, cost in costs.items():
        (ranked,) = leaderboards(
            {"trace": trace},
            [cost],
            trials=config["trials"],
            tuning_share=config["tuning_share"],
            replays=config["replay_seeds"],
            seed=config["seed"],
            sensitivity=False,
            progress=progress,
        )
        rows = [row for row in ranked.as_dict()["rows"] if row["truncated_share"] <= MOST_TRUNCATED]
        boards[name] = [{key: row[key] for key in KEPT} for row in rows]
    return boards


def found_of(folder: Path, config: Config, progress: Progress) -> dict[str, Any]:
    """Return what the report shows beside the validation."""
    trace = read_trace(folder / "trace")
    return {
        "boards": boards_of(trace, costs_of(folder, config), config, progress),
        "paper": asdict(PaperComparison.of(trace, config)),
    }


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    runs, replayed = {}, {}
    for run in config["runs"]:
        folder, name = out / run["name"], run_title(run)
        with progress_bar() as progress:
            runs[name] = validation(folder, "model", kinds_run(config), run, config, progress, trees=True)
            replayed[name] = cached(folder / FOUND, partial(found_of, folder, config, progress))
    report(config, runs, replayed).write(out)
