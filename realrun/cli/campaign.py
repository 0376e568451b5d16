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

    out: Path = setting(..., "Folder of result files; a second run continues there. Scratch: OUT-work.")
    minutes: float = setting(30, "Time for all stages together.", low=0.1)
    stage: list[str] = setting([], "Stage to run, by name; repeat for several. Default: all.")
    device: str | None = setting(None, "cuda, cpu, ... Default: cuda if available.")
    overwrite: bool = setting(False, "Run stages again whose results are complete.", flag="--overwrite/--no-overwrite")


def campaign(options: CampaignOptions) -> Answer:
    """Run everything that needs a GPU, in stages.

    smoke: each kernel against its reference, clocks, free memory. validate, board: the bundled target and its drafters.
    cost-grid-SHAPE: passes at true model shapes. scripted-1 to -3: predicted against measured speedup at 7B and 8B.
    kernels: their benchmark. tests, memcheck, racecheck: the tests for a GPU, and compute-sanitizer.

    Every stage writes one result file, ends within its own limit, and is not run again once it is complete. A stage
    that fails leaves its error, and the next one runs. Without a GPU the stages run at reduced sizes.
    """
    begun = time.monotonic()  # on a busy machine what follows takes many seconds

    silence_libraries()
    from realrun.campaign import run_campaign
    from specsim.io.files import working_in

    with working_in(options.out), progress_bar() as report:
        results = run_campaign(
            options.out,
            minutes=options.minutes,
            stages=options.stage,
            device=options.device,
            overwrite=options.overwrite,
            seed=options.seed,
            progress=report,
            begun=begun,
        )
    rows = [[result["stage"], f"{result['seconds']:.0f}", state_in_words(result)] for result in results]
    show = partial(print_table, f"campaign in {options.out}", ["stage", "seconds", "state"], rows)
    return Answer({"out": str(options.out), "stages": results}, show, not any("error" in result for result in results))


def state_in_words(result: Mapping[str, Any]) -> str:
    """Describe how a stage ended."""
    if "error" in result:
        return str(result["error"])
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    return "complete" if result["complete"] else f"out of time ({result['left']}): run again to go on"
