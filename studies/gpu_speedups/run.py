"""Speedups on a GPU against forecasts made without it: `python -m studies gpu_speedups`.

Decodes with random weights in the shapes of public models, where a recorded trace decides what is accepted. The report
replays the same rounds at the costs of a data sheet, before and after calibration on another GPU's passes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from realrun.experiment.scripted import ScriptedSettings, run_scripted
from specsim.cost.grid import read_grid
from specsim.io.errors import InputError
from specsim.io.examples import located
from specsim.trace.files import read_trace
from studies.common import Config, Document, cached
from studies.gpu_speedups.report import report

MEASURED = "scripted.json"
RECORDED = (MEASURED,)
GRIDS = Path(__file__).parents[1] / "gpu_passes" / "recorded"


def measured(config: Config) -> Document:
    """Decode with tuned policies and without speculation."""
    if not torch.cuda.is_available():
        raise InputError("the study gpu_speedups decodes on a GPU, and this machine has none; run it on a GPU")
    trace = read_trace(located(config["trace"], "trace"))
    settings = ScriptedSettings(
        config["context"], trials=config["trials"], seed=config["seed"], minutes=config["minutes"]
    )
    return run_scripted(config["target"], config["drafter"], trace, settings, device="cuda", dtype=config["dtype"])


def main(out: Path, config: Config) -> None:
    """Decode, unless the results are there, and write the report."""
    document = cached(out / MEASURED, partial(measured, config))
    grids = {name: read_grid(GRIDS / f"{name}.json") for name in (config["target"], config["drafter"])}
    report(config, document, grids, read_trace(located(config["trace"], "trace"))).write(out)
