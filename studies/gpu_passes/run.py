"""Passes of models on a GPU against a roofline of its data sheet: `python -m studies gpu_passes`.

Times passes of random weights in the shapes of public models, over tokens, contexts and batches. The report compares
them with the roofline before calibration, calibrated on every other cell, and calibrated on the other model.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from realrun.measure.cost_grid import Axes, run_cost_grid
from specsim.cost.grid import read_grid
from specsim.io.errors import InputError
from studies.common import Config, Document, cached
from studies.gpu_passes.report import report

RECORDED = ("*.json",)


def measured(model: str, config: Config) -> Document:
    """Time the passes of a model."""
    if not torch.cuda.is_available():
        raise InputError("the study gpu_passes times passes on a GPU, and this machine has none; run it on a GPU")
    axes = Axes(*(config[name] for name in ("tokens", "contexts", "batches")))
    return run_cost_grid(
        model, axes=axes, device="cuda", dtype=config["dtype"], seed=config["seed"], minutes=config["minutes"]
    )


def main(out: Path, config: Config) -> None:
    """Time the models that are missing, and write the report."""
    documents = {model: cached(out / f"{model}.json", partial(measured, model, config)) for model in config["models"]}
    report(config, documents, {model: read_grid(out / f"{model}.json") for model in config["models"]}).write(out)
