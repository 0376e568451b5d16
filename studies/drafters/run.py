"""Drafters inside the lab's target (EESD, MEDUSA), beside its draft model: `python -m studies drafters`.

Validates every drafter of config.toml (recorded, profiled, tuned, predicted, really decoded on this machine), and
weighs speed against likelihood for MEDUSA's typical acceptance. A second start goes on with what is there. EESD's
ablation is in studies/training.
"""

from __future__ import annotations

from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.io.files import write_text
from studies.common import REPLAYED, Config, claim, run_title
from studies.drafters.jobs import cheap_jobs, main_jobs, typical_job
from studies.drafters.report import report, typical_figure

RECORDED = ("config.json", "typical.json", *(f"*/*/{name}" for name in (REPLAYED, "cheap.json")))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    with progress_bar() as progress:
        runs = {run_title(run): main_jobs(out, run, config, progress) for run in config["runs"]}
        cheap = {run_title(run): cheap_jobs(out, run, config, progress) for run in config["runs"]}
        typical = typical_job(out, config, next(iter(runs.values()))["medusa-1"], progress)
    report(config, runs, cheap, typical).write(out)
    write_text(out / "figures" / "typical.svg", typical_figure(typical))
