"""Chain policies on the embedded lab, replayed and really run: `python -m studies chain_policies`.

For each run of config.toml: record the lab and validate every chain policy on held-out prompts (replayed and really
decoded, on this machine's own costs). A second start goes on with what is there.
"""

from __future__ import annotations

from pathlib import Path

from specsim.cli.console import progress_bar
from specsim.policy.registry import CHAIN_POLICIES
from studies.chain_policies.report import report
from studies.common import VALIDATED, Config, claim, run_title, validation

RECORDED = ("config.json", *(f"*/{name}" for name in VALIDATED))


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    kinds = [kind for name, kind in CHAIN_POLICIES.items() if name not in config["left_out"]]
    with progress_bar() as progress:
        runs = {
            run_title(run): validation(out / run["name"], "model", kinds, run, config, progress)
            for run in config["runs"]
        }
    report(config, runs).write(out)
