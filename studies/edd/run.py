"""EDD beside VDM, MEDUSA-1 and EAGLE, and candidate trees on EDD, with the bundled models: `python -m studies edd`.

Trains VDM, validates every drafter of config.toml (recorded, profiled, tuned, predicted, really decoded on this
machine), and replays what was recorded at the paper's costs as well. A second start goes on with what is there.
EDD's ablation is in studies/training.
"""

from __future__ import annotations

from pathlib import Path

from specsim.cli.console import progress_bar
from studies.common import REPLAYED, Config, claim, run_title
from studies.edd import jobs
from studies.edd.report import report

RECORDED = ("config.json", jobs.FACTS, *(f"*/*/{name}" for name in (REPLAYED, "board-*.json")))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    with progress_bar() as progress:
        runs = {run_title(run): jobs.main_jobs(out, run, config, progress) for run in config["runs"]}
        boards = {run_title(run): jobs.tree_boards(out, run, config, progress) for run in config["runs"]}
    report(config, jobs.drafter_facts(out, config), runs, boards).write(out)
