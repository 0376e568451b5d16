"""Stage profile: cost grids of public model shapes, targets and drafters, on this device.

The result holds one cost grid per shape and, for each, how near the autoregressive step comes
to the time that reading its weights takes at the measured copy bandwidth.
"""

from __future__ import annotations

import gc
from typing import Any

from realrun.campaign.job import Job
from realrun.measure.cost_grid import Axes, run_cost_grid
from realrun.pairs.shapes import pass_weight_bytes, shape_config
from speckernels.bench.machine import measure_ceilings

# The most wanted first: time may run out.
SHAPES = (
    "llama-3.1-8b",
    "llama-3.2-1b",
    "llama-2-7b",
    "one-layer-7b",
    "llama-2-drafter-115m",
    "llama-68m",
    "llama-2-13b",
    "one-layer-13b",
    "qwen3-8b",
    "qwen3-0.6b",
    "vicuna-33b",
    "llama-2-70b",
)
REDUCED_SHAPES = ("llama-3.1-8b", "qwen3-0.6b")
REDUCED_AXES = Axes(tokens=(1, 2, 4, 16), contexts=(32, 128), batches=(1, 2))


def run(job: Job) -> dict[str, Any]:
    names = SHAPES if job.full else REDUCED_SHAPES
    grids: dict[str, Any] = job.previous().get("grids", {})
    errors: dict[str, str] = {}
    copy_gb_s = measure_ceilings(job.device).copy_gb_s
    for number, name in enumerate(names):
        job.report(number, len(names))
        if name in grids and not _short_of_time(grids[name]):
            continue
        if job.left_s() < 1:
            break
        axes = _axes(name) if job.full else REDUCED_AXES
        try:
            grid = run_cost_grid(
                name,
                axes=axes,
                device=str(job.device),
                dtype=job.dtype_name,
                smoke=not job.full,
                seed=job.seed,
                minutes=job.minutes(1 / (len(names) - number)),
                progress=job.on_time,
            )
            if name not in grids or _missing(grid) < _missing(grids[name]):
                grids[name] = grid
            job.save({"grids": grids, "copy_gb_s": copy_gb_s})
        except Exception as error:  # the other shapes' times are worth having
            errors[name] = f"{type(error).__name__}: {error}"
        gc.collect()
    left = [name for name in names if name not in grids or _short_of_time(grids[name])]
    return {
        "grids": grids,
        "copy_gb_s": copy_gb_s,
        "left": left,
        "autoregressive": {name: against_floor(name, grid, copy_gb_s, job) for name, grid in grids.items()},
        "errors": errors,
        "complete": not left,
    }


def _axes(name: str) -> Axes:
    """The whole grid, as far as the model has positions."""
    whole, positions = Axes(), int(shape_config(name).max_position_embeddings)
    if positions >= 32768:
        return whole
    # Time does not depend on whether a position was trained, so longer contexts are measured all the same,
    # but not 32k for a model made for 2k or 4k.
    return Axes(contexts=[c for c in whole.contexts if c <= 4 * positions])


def _missing(grid: dict[str, Any]) -> int:
    return sum(len(entry["tokens"]) for entry in grid["missing"])


def _short_of_time(grid: dict[str, Any]) -> bool:
    return any(entry["reason"].startswith("time") for entry in grid["missing"])


def against_floor(name: str, grid: dict[str, Any], copy_gb_s: float, job: Job) -> dict[str, Any]:
    """The autoregressive step at batch 1 and the shortest context, and the floor: reading the weights once."""
    step_s = grid["median_s"][0][0][0]
    config = shape_config(name, smoke=not job.full)
    floor_s = pass_weight_bytes(config, job.dtype) / (copy_gb_s * 1e9)
    return {"step_s": step_s, "floor_s": floor_s, "share_of_floor": floor_s / step_s if step_s else None}
