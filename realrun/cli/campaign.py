"""The command `realrun campaign`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from realrun.cli.options import silence_libraries
from specsim.cli.command import Answer
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.settings import setting


@dataclass(frozen=True, kw_only=True)
class CampaignOptions(SeedSettings):
    """Which stages run, where, and for how long."""

    out: Path = setting(..., "Folder of result files; a second run continues there.")
    minutes: float = setting(30, "Time for all stages together.", low=0.1)
    stage: list[str] = setting([], "smoke, kernels, profile, lab or validate; repeat for several. Default: all.")
    work: Path | None = setting(None, "Folder for checkpoints and scratch. Default: OUT-work.")
    device: str | None = setting(None, "cuda, cpu, ... Default: cuda if available.")
    overwrite: bool = setting(False, "Run stages again whose results are complete.", flag="--overwrite/--no-overwrite")


def campaign(options: CampaignOptions) -> Answer:
    """Run everything that needs a GPU, in stages.

    Every stage is short and writes one result file. smoke: at most 90 s, checks that everything runs here and agrees
    with the CPU. kernels: GPU tests, a memory and race check, the benchmark. profile: cost grids at true model shapes.
    lab: train a larger lab pair and record its traces. validate: predicted against measured speedup, on the lab and
    with scripted acceptance at 7B to 13B.

    Without a GPU the same stages run at reduced sizes. `specsim data list --folder OUT` reads the results.
    """
    begun = time.monotonic()  # on a busy machine what follows takes many seconds

    silence_libraries()
    from realrun.campaign.run import ALL, run_campaign
    from specsim.io.files import working_in

    with working_in(options.out), progress_bar() as report:
        results = run_campaign(
            options.out,
            minutes=options.minutes,
            stages=options.stage or [ALL],
            work=options.work,
            device=options.device,
            overwrite=options.overwrite,
            seed=options.seed,
            progress=report,
            begun=begun,
        )
    rows = [[result["stage"], f"{result['seconds']:.0f}", state_in_words(result)] for result in results]
    show = partial(print_table, f"campaign in {options.out}", ["stage", "seconds", "state"], rows)
    passed = not any(result.get("error") or result.get("errors") for result in results)
    return Answer({"out": str(options.out), "stages": results}, show, passed)


def state_in_words(result: Mapping[str, Any]) -> str:
    """How a stage ended, in words."""
    if result["complete"]:
        return "complete"
    if "error" in result:
        return str(result["error"])
    if result.get("errors"):
        return "; ".join(f"{what}: {why}" for what, why in result["errors"].items())
    left = result.get("left") or ""
    remaining = left if isinstance(left, str) else f"{', '.join(left)} left"
    return f"out of time{f' ({remaining})' if remaining else ''}: run again to go on"
