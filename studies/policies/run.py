"""Policies on SmolLM2 with EAGLE, on this machine and at the costs of a GPU: `python -m studies policies`.

For each run of config.toml: record the tuning prompts with draft trees, tune every policy, decode the held-out prompts,
then rank all policies under this machine's costs and the GPU's, and judge the signals that stop a draft. A second start
goes on with what is there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from specsim.cli.console import progress_bar
from specsim.compare.leaderboard import leaderboards
from specsim.cost.files import read_cost
from specsim.io.progress import Progress
from specsim.policy.registry import POLICIES
from specsim.trace.files import read_trace
from studies.common import MOST_TRUNCATED, VALIDATED, Config, cached, claim, gpu_costs, run_title, validation
from studies.policies import signals
from studies.policies.report import CPU, GPU, report

FOUND = "found.json"  # leaderboards by cost
SIGNALS = "signals.json"
RECORDED = ("config.json", SIGNALS, f"*/{FOUND}", *(f"*/{name}" for name in VALIDATED))
KEPT = ("label", "policy", "params", "speedup", "tau", "v_d", "train_speedup", "truncated_share", "tied_with_leader")


def boards_of(folder: Path, config: Config, progress: Progress) -> dict[str, Any]:
    """Return the ranking at both costs, without rows whose rounds the record truncates too often."""
    trace = read_trace(folder / "trace")
    boards = {}
    for name, cost in {CPU: read_cost(folder / "profile.json"), GPU: gpu_costs(config["gpu"])}.items():
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


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    kinds = [POLICIES[name] for name in config["run"]]
    runs, boards = {}, {}
    for run in config["runs"]:
        folder, name = out / run["name"], run_title(run)
        with progress_bar() as progress:
            runs[name] = validation(folder, config["drafter"], kinds, run, config, progress, trees=True)
            boards[name] = cached(folder / FOUND, partial(boards_of, folder, config, progress))
    with progress_bar() as progress:
        judged = cached(out / SIGNALS, partial(signals.find, out / "signals", config["signals"], progress))
    report(config, runs, boards, judged).write(out)
