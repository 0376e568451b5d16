"""The command `realrun gpu`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from realrun.cli.options import silence_libraries
from specsim.cli.command import Answer
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.settings import setting


@dataclass(frozen=True, kw_only=True)
class GpuOptions(SeedSettings):
    """Which stages run, where, and for how long."""

    out: Path = setting(..., "Folder of result files; a second run continues there. Weights and scratch: OUT-work.")
    minutes: float = setting(8, "Time for all stages together.", low=0.1)
    stage: list[str] = setting([], "Stage to run, by name; repeat for several. Default: all.")
    target: str | None = setting(None, "Model whose drafters are trained. Default: smollm2; without a GPU lab.")
    device: str | None = setting(None, "cuda, cpu, ... Default: cuda if available.")
    overwrite: bool = setting(False, "Run stages again whose results are complete.", flag="--overwrite/--no-overwrite")


def gpu(options: GpuOptions) -> Answer:
    """Do all that needs a GPU, in stages.

    check: each kernel against its reference, clocks, free memory. text: the target answers questions. train: the
    papers' drafters on that text, several at once. decode-greedy, decode-sampled: their speedups, forecast and then
    measured. kernels: their benchmark. memcheck, racecheck: compute-sanitizer. transfer: passes and speedups at 8B, for
    another card's forecast. train-more: drafters of less worth. tests: those that need a GPU.

    Every stage writes one result file, ends within its own limit, and is not run again once it is complete. A stage
    that fails leaves its error, and the next one runs. Without a GPU the stages run at reduced sizes.

    Example: realrun gpu --out results --minutes 8
    """
    begun = time.monotonic()  # on a busy machine what follows takes many seconds

    silence_libraries()
    from realrun.gpu import run_stages
    from specsim.io.files import working_in

    with working_in(options.out), progress_bar() as report:
        results = run_stages(
            options.out,
            minutes=options.minutes,
            stages=options.stage,
            target=options.target,
            device=options.device,
            overwrite=options.overwrite,
            seed=options.seed,
            progress=report,
            begun=begun,
        )
    rows = [[r.document["stage"], f"{r.document['seconds']:.0f}", r.state] for r in results]
    show = partial(print_table, f"stages in {options.out}", ["stage", "seconds", "state"], rows)
    document = {"out": str(options.out), "stages": [result.document for result in results]}
    return Answer(document, show, not any(result.failed for result in results))
