"""Passes of models on a GPU against a roofline of its data sheet: `python -m studies gpu_passes`.

Times passes of random weights in the shapes of public models, over tokens, contexts and batches. The report compares
them with the roofline before calibration, calibrated on every other cell, and calibrated on the other model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from realrun.measure.cost_grid import Axes, run_cost_grid
from specsim.cost.grid import GridCost, read_grid
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.calibration import fit_passes
from specsim.cost.roofline.hardware import Derating, find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.io.arrays import Bools, Floats
from specsim.io.errors import InputError
from specsim.report.table import Column
from studies.common import Config, Document, cached
from studies.figures import line_panels
from studies.report import SIGNED, TENTH, Report

Grids = Mapping[str, GridCost]
RECORDED = ("*.json",)


def measured(model: str, config: Config) -> Document:
    """Time the passes of a model."""
    if not torch.cuda.is_available():
        raise InputError("the study gpu_passes times passes on a GPU, and this machine has none; run it on a GPU")
    axes = Axes(*(config[name] for name in ("tokens", "contexts", "batches")))
    return run_cost_grid(
        model, axes=axes, device="cuda", dtype=config["dtype"], seed=config["seed"], minutes=config["minutes"]
    ).as_dict()


def main(out: Path, config: Config) -> None:
    """Time the models that are missing, and write the report."""
    documents = {model: cached(out / f"{model}.json", partial(measured, model, config)) for model in config["models"]}
    report(config, documents, {model: read_grid(out / f"{model}.json") for model in config["models"]}).write(out)


def report(config: Config, documents: Mapping[str, Document], grids: Grids) -> Report:
    """Return the report. documents : the grids' files; grids : measured passes by model"""
    rows = [row for model in grids for row in model_rows(model, grids, config)]
    means = [row for row in rows if row["batch"] == "all"]
    first = next(iter(grids.values()))
    flat = {model: float(100 * (grid.median_s[0, 0, 4] / grid.median_s[0, 0, 0] - 1)) for model, grid in grids.items()}
    origin = next(iter(documents.values()))["provenance"]
    return Report(
        question="How well does a data sheet predict the passes of a model on a GPU?",
        answer=f"A roofline of the {find_hardware(config['hardware']).title}'s data sheet is off by a median of "
        f"{both(means, 'uncalibrated_percent', 0)} ({' and '.join(grids)}), nearly always towards too short a time. "
        "Calibrated on half of a model's passes it predicts the other half within a median of "
        f"{both(means, 'calibrated_percent', 1)}, and calibrated on the other model within "
        f"{both(means, 'other_percent', 0)}.",
        figure=line_panels(
            {
                f"{model}, {first.contexts[0]} tokens of context": {
                    f"batch {batch}": (
                        grid.tokens.tolist(),
                        [quartiles(documents[model], at, n) for n in range(len(grid.tokens))],
                    )
                    for at, batch in enumerate(grid.batches)
                }
                for model, grid in grids.items()
            },
            ("tokens of a pass, per sequence", "time, in passes over one token"),
            "passes",
            level=1,
            log_x=True,
        ),
        figure_name="passes",
        caption="Time of a pass over several tokens, over that of a pass over one token; dashed: as long as one",
        columns=[
            Column("model", "model"),
            Column("batch", "batch"),
            Column("passes", "cells"),
            Column("data sheet: median error, %", "uncalibrated_percent", TENTH),
            Column("median of signed errors, %", "bias_percent", SIGNED),
            Column("calibrated: median, %", "calibrated_percent", TENTH),
            Column("calibrated on the other model: median, %", "other_percent", TENTH),
        ],
        shown=rows,
        table=rows,
        trust=[
            f"Machine: {origin['device']}, {config['dtype']}, torch {origin['torch']}, {origin['date'][:10]}, one "
            "run. Random weights in the models' shapes, passes in CUDA graphs; no prompts play a part.",
            "Load: none, the GPU was this run's alone. Noise floor: half the distance between the quartiles of a "
            f"pass's times is {spread_percent(documents.values()):.2f} % of it (median over passes).",
            f"A pass over five tokens takes {' and '.join(f'{value:.1f} % ({m})' for m, value in flat.items())} "
            f"longer than over one (batch 1, {first.contexts[0]} tokens of context).",
            f"Data sheet: at {config['assumed']['memory']:.0%} of its bandwidth and {config['assumed']['compute']:.0%} "
            "of its products, as large copies and products reach them. The shares that passes of models reach, fitted "
            "here, are what specsim assumes for all GPUs that were not measured.",
            "Calibrated: on every other pass of the same model, as on a chessboard, and judged on those between. "
            "Calibrated on the other model: on all of its passes.",
            "One GPU, two dense models and this suite's own passes: engines add their own overhead to every step.",
        ],
    )


def both(rows: Sequence[Document], key: str, digits: int) -> str:
    """Write this percentage of every row."""
    return " and ".join(f"{row[key]:.{digits}f} %" for row in rows)


def roofline(model: str, config: Config) -> Roofline:
    """Return the roofline of a model before calibration."""
    return Roofline(
        find_architecture(model),
        find_hardware(config["hardware"]),
        config["dtype"],
        derating=Derating(**config["assumed"]),
    )


def cells(grid: GridCost) -> list[tuple[int, int, int]]:
    """List tokens, context and batch of all passes, in the order of the grid."""
    return [(int(n), int(c), int(b)) for b in grid.batches for c in grid.contexts for n in grid.tokens]


def errors(passes: Roofline, grid: GridCost) -> Floats:
    """Compute the signed error of every pass [B, C, T], in percent."""
    predicted = np.array([float(passes.seconds(*cell)) for cell in cells(grid)])
    return np.asarray(100 * (predicted.reshape(grid.median_s.shape) / grid.median_s - 1))


def fitted(model: str, grid: GridCost, seen: Bools, config: Config) -> Roofline:
    """Return the roofline calibrated on these passes [B, C, T]."""
    passes = roofline(model, config)
    operations = [passes.operations(*cell) for cell, used in zip(cells(grid), seen.ravel(), strict=True) if used]
    return fit_passes(passes, operations, grid.median_s[seen])


def model_rows(model: str, grids: Grids, config: Config) -> Iterator[Document]:
    """Yield a model's errors by batch and over all batches."""
    grid = grids[model]
    seen = np.indices(grid.median_s.shape).sum(axis=0) % 2 == 0
    before, calibrated = errors(roofline(model, config), grid), errors(fitted(model, grid, seen, config), grid)
    (other,) = (name for name in grids if name != model)
    derating = fitted(other, grids[other], np.ones_like(seen), config).derating
    moved = errors(replace(roofline(model, config), derating=derating), grid)
    for batch in (*grid.batches.tolist(), "all"):
        rows = np.broadcast_to(((grid.batches == batch) | (batch == "all"))[:, None, None], seen.shape)
        yield {
            "model": model,
            "batch": batch,
            "cells": int(rows.sum()),
            "uncalibrated_percent": float(np.median(abs(before[rows]))),
            "bias_percent": float(np.median(before[rows])),
            "calibrated_percent": float(np.median(abs(calibrated[rows & ~seen]))),
            "calibrated_p90_percent": float(np.quantile(abs(calibrated[rows & ~seen]), 0.9)),
            "other_percent": float(np.median(abs(moved[rows]))),
            "other_p90_percent": float(np.quantile(abs(moved[rows]), 0.9)),
        }


def quartiles(document: Document, batch: int, tokens: int) -> dict[str, float]:
    """Return the median and the quartiles of a pass's times at the first context, over the median of one token."""
    one = document["median_s"][batch][0][0]
    estimate, low, high = (document[key][batch][0][tokens] / one for key in ("median_s", "p25_s", "p75_s"))
    return {"estimate": estimate, "low": low, "high": high}


def spread_percent(documents: Iterable[Document]) -> float:
    """Compute half the distance of the quartiles in percent of the median, the median over all passes."""
    spreads = [50 * (np.array(d["p75_s"]) - np.array(d["p25_s"])) / np.array(d["median_s"]) for d in documents]
    return float(np.median(np.concatenate([spread.ravel() for spread in spreads])))
