"""The commands on public model shapes with random weights: `shapes`, `cost-grid`, `scripted`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrun.cli.options import REPEATS_HELP, SMOKE_TEST_HELP, TRIALS_HELP
from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_table, progress_bar
from specsim.cli.options import OVERWRITE_FILE_HELP, SeedSettings
from specsim.io.settings import argument, setting

if TYPE_CHECKING:
    from realrun.measure.cost_grid import MeasuredGrid


@dataclass(frozen=True, kw_only=True)
class ShapeRun(SeedSettings):
    """Where a run on model shapes takes place, for how long, and which file it writes."""

    out: Path = setting(..., "File to write, JSON.")
    device: str = setting("cuda", "cuda, cuda:1, cpu, ...")
    dtype: str = setting("bfloat16", "Number type of the models: float32, float64, bfloat16 or float16.")
    smoke_test: bool = setting(False, SMOKE_TEST_HELP, flag="--smoke-test")
    minutes: float | None = setting(None, "Stop in good order after this time.", low=0.01)
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def shapes() -> Answer:
    """List the shapes for cost-grid and scripted."""
    from realrun.pairs.shapes import DRAFTERS, SHAPES, kv_bytes_per_token, parameter_count, shape_config

    rows, cells = [], []
    for name in SHAPES:
        config, role = shape_config(name), "drafter" if name in DRAFTERS else "target"
        parameters, cache_bytes = parameter_count(config), kv_bytes_per_token(config)
        layers, vocabulary = int(config.num_hidden_layers), int(config.vocab_size)
        row = {"shape": name, "role": role, "parameters": parameters, "layers": layers, "vocabulary": vocabulary}
        rows.append({**row, "cache_bytes_per_token": cache_bytes})
        cache = f"{cache_bytes / 1024:.0f} KiB"
        cells.append([name, role, f"{parameters / 1e9:.2f} B", str(layers), f"{vocabulary:,}", cache])
    columns = ["shape", "role", "parameters", "layers", "vocabulary", "cache per token, bf16"]
    return Answer({"shapes": rows}, partial(print_table, "shapes", columns, cells))


@dataclass(frozen=True, kw_only=True)
class GridOptions(ShapeRun):
    """Shape to time, and sizes of its passes."""

    shape: str = argument("A shape; `realrun shapes` lists them.")
    tokens: tuple[int, ...] | None = setting(None, "New tokens per pass. Default: 16 sizes from 1 to 256.")
    contexts: tuple[int, ...] | None = setting(None, "Cached tokens. Default: 0, and 128 to 32k, doubling.")
    batches: tuple[int, ...] | None = setting(None, "Batch sizes. Default: 1 to 64, doubling.")
    repeats: int = setting(10, "Timed passes per point.", low=2)


def cost_grid(options: GridOptions) -> Answer:
    """Time forward passes of a model shape.

    Passes are timed over new tokens, context and batch size. Two grids price a trace:
    `specsim replay --cost TARGET_GRID --draft-cost DRAFTER_GRID --batch B`.

    Example: realrun cost-grid llama-3.1-8b --out 8b.json --batches 1,8 --minutes 5
    """
    from realrun.measure.cost_grid import BATCHES, CONTEXTS, TOKENS, Axes, run_cost_grid
    from specsim.io.files import write_json

    claim_file(options.out, overwrite=options.overwrite)
    axes = Axes(*map(list, (options.tokens or TOKENS, options.contexts or CONTEXTS, options.batches or BATCHES)))
    with progress_bar() as report:
        grid = run_cost_grid(
            options.shape,
            axes=axes,
            repeats=options.repeats,
            seed=options.seed,
            minutes=options.minutes,
            progress=report,
            device=options.device,
            dtype=options.dtype,
            smoke=options.smoke_test,
        )
    document = grid.as_dict()
    write_json(document, options.out)
    return Answer(document, partial(_print_grid, grid))


def _print_grid(grid: MeasuredGrid) -> None:
    rows = [
        [str(batch), str(context), *("-" if math.isnan(t) else f"{1000 * t:.3f}" for t in passes)]
        for batch, times in zip(grid.axes.batches, grid.tables["median_s"].tolist(), strict=True)
        for context, passes in zip(grid.axes.contexts, times, strict=True)
    ]
    columns = ["batch", "context", *(f"{n} tokens" for n in grid.axes.tokens)]
    print_table(f"{grid.model}: milliseconds per pass", columns, rows, labels=2)


@dataclass(frozen=True, kw_only=True)
class ScriptedOptions(ShapeRun):
    """Which shapes decode by which trace."""

    target: str = argument("Target shape; `realrun shapes` lists them.")
    draft: str = argument("Drafter shape.")
    trace: Path = argument("Trace that decides which tokens are accepted.")
    context: int = setting(0, "Tokens of random text before every prompt.", low=0)
    trials: int = setting(100, TRIALS_HELP, low=1)
    repeats: int = setting(3, REPEATS_HELP)


def scripted(options: ScriptedOptions) -> Answer:
    """Validate speedups at true model shapes.

    Acceptance, and what a policy sees of each drafted token, comes from the trace; weights are random, all compute is
    real. Policies are tuned on one half of the trace and run on the other.
    """
    from realrun.experiment.scripted import ScriptedSettings, run_scripted
    from specsim.io.files import write_json
    from specsim.trace.files import read_plain_trace

    settings = ScriptedSettings(
        context=options.context,
        trials=options.trials,
        repeats=options.repeats,
        seed=options.seed,
        minutes=options.minutes,
    )
    claim_file(options.out, overwrite=options.overwrite)
    with progress_bar() as report:
        document = run_scripted(
            options.target,
            options.draft,
            read_plain_trace(options.trace),
            settings,
            progress=report,
            device=options.device,
            dtype=options.dtype,
            smoke=options.smoke_test,
        )
    write_json(document, options.out)
    return Answer(document, partial(_print_scripted, document, options.context))


def _print_scripted(document: dict[str, Any], context: int) -> None:
    rows = [
        [r["label"], r["role"], f"{r['predicted']['estimate']:.3f}", f"{r['measured']['estimate']:.3f}",
         f"{r['error_percent']:+.1f}", f"{r['rounds_identical_percent']:.2f}", f"{r['tau']:.2f}",
         f"{100 * r['oracle_regret']:.1f} %"]
        for r in document["rows"]
    ]  # fmt: skip
    columns = ["policy", "settings", "predicted", "measured", "error %", "rounds identical %", "tau", "gap to oracle"]
    print_table(f"{document['target']} + {document['drafter']}, context {context}", columns, rows)
    print(f"median absolute error: {document['median_abs_error_percent']:.2f} %")
    done = document["done"]
    if done["stopped_early"]:
        print(f"out of time: {done['sequence_runs']} of {done['sequence_runs_asked']} sequence runs finished")
