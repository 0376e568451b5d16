"""EDD beside VDM, MEDUSA-1 and EAGLE, and candidate trees on EDD, on the lab: `python -m studies.edd.run [OUT]`.

Trains VDM, validates every drafter of config.toml (recorded, profiled, tuned, predicted, really decoded on this
machine), and replays what was recorded at the paper's costs as well. A second start goes on with what is there.
EDD's ablation is in studies/training.

Writes OUT/figures/ and OUT/report.md, in which every number comes from the runs.
"""

from __future__ import annotations

from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.files import write_text
from specsim.policy.chain.fixed_k import FixedK
from specsim.report.validation_figures import reliability_diagram
from studies.common import REPLAYED, Config, claim, run_study
from studies.edd import figures, jobs, tables, text
from studies.edd.jobs import EDD

RECORDED = ("config.json", jobs.FACTS, *(f"*/*/{name}" for name in (REPLAYED, "rounds.parquet", "board-*.json")))


def short(row: tables.Row) -> str:
    """A row's name in a figure: the table has its settings."""
    return row["label"] if row["policy"] == FixedK.name else f"{row['policy']}, {row['role']}"


def write_figures(folder: Path, runs: dict[str, text.Documents]) -> None:
    """All figures as SVG."""
    for name, documents in runs.items():
        points = []
        for drafter, document in documents.items():
            points += [(f"{tables.NAMES[drafter]}, {short(row)}", row) for row in tables.shown_chains(document)]
        write_text(folder / f"drafters-{name}.svg", figures.speedups(points, f"drafters-{name}", "Drafters as chains"))
        trees = [
            (f"{tables.TREES[row['policy']]}, {row['role']}", row)
            for row in documents[EDD]["rows"]
            if row["policy"] in tables.TREES
        ]
        write_text(folder / f"trees-{name}.svg", figures.speedups(trees, f"trees-{name}", "Candidate trees on EDD"))
        write_text(folder / f"calibration-{name}.svg", reliability_diagram(documents[EDD]["reliability"]))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    with progress_bar() as report:
        runs = {run["name"]: jobs.main_jobs(out, run, config, report) for run in config["runs"]}
        boards = {run["name"]: jobs.tree_boards(out, run, config, report) for run in config["runs"]}
    write_figures(out / "figures", runs)
    facts = jobs.drafter_facts(out, config)
    write_text(out / "report.md", text.report_text(config, facts, runs, boards, out))


if __name__ == "__main__":
    run_study(main, __file__)
