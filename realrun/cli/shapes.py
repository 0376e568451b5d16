"""The commands on public model shapes with random weights: `shapes`, `cost-grid`, `scripted`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from realrun.cli.options import DtypeOption, JsonOption, RepeatsOption, SeedOption, SmokeTestOption, TrialsOption
from specsim.cli.console import OverwriteFileOption, check_new, parse_numbers, print_json, print_table, progress_bar

DeviceOption = Annotated[str, typer.Option(help="cuda, cuda:1, cpu, ...")]
MinutesOption = Annotated[float | None, typer.Option(help="Stop in good order after this time.", min=0.01)]


def shapes(json: JsonOption = False) -> None:
    """List the public model shapes that cost-grid and scripted know."""
    from realrun.pairs.shapes import DRAFTERS, SHAPES, kv_bytes_per_token, parameter_count, shape_config

    rows: list[dict[str, Any]] = []
    for name in SHAPES:
        config = shape_config(name)
        rows.append(
            {
                "shape": name,
                "role": "drafter" if name in DRAFTERS else "target",
                "parameters": parameter_count(config),
                "layers": int(config.num_hidden_layers),
                "vocabulary": int(config.vocab_size),
                "cache_bytes_per_token": kv_bytes_per_token(config),
            }
        )
    if json:
        print_json({"shapes": rows})
        return
    table = [
        [r["shape"], r["role"], f"{r['parameters'] / 1e9:.2f} B", str(r["layers"]), f"{r['vocabulary']:,}",
         f"{r['cache_bytes_per_token'] / 1024:.0f} KiB"]
        for r in rows
    ]  # fmt: skip
    print_table("shapes", ["shape", "role", "parameters", "layers", "vocabulary", "cache per token, bf16"], table)


def cost_grid(
    shape: Annotated[str, typer.Argument(help="A shape; `realrun shapes` lists them.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write, JSON.", show_default=False)],
    tokens: Annotated[str | None, typer.Option(help="New tokens per pass. Default: 16 sizes from 1 to 256.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Cached tokens. Default: 0, and 128 to 32k, doubling.")] = None,
    batches: Annotated[str | None, typer.Option(help="Sequences. Default: 1 to 64, doubling.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed passes per point.", min=2)] = 10,
    device: DeviceOption = "cuda",
    dtype: DtypeOption = "bfloat16",
    smoke_test: SmokeTestOption = False,
    minutes: MinutesOption = None,
    seed: SeedOption = 0,
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    """Time a model shape's passes over new tokens, context and batch.

    `specsim replay --cost TARGET_GRID --draft-cost DRAFTER_GRID --batch B` prices a trace with two of them.

    Example: realrun cost-grid llama-3.1-8b --out 8b.json --batches 1,8 --minutes 5
    """
    from realrun.profiling.cost_grid import BATCHES, CONTEXTS, TOKENS, Axes, run_cost_grid
    from specsim.files import check_writable, write_json

    check_new(out, overwrite=overwrite)
    check_writable(out)
    axes = Axes(
        _numbers("--tokens", tokens, TOKENS),
        _numbers("--contexts", contexts, CONTEXTS),
        _numbers("--batches", batches, BATCHES),
    )
    with progress_bar() as report:
        document = run_cost_grid(
            shape,
            axes=axes,
            repeats=repeats,
            device=device,
            dtype=dtype,
            smoke=smoke_test,
            seed=seed,
            minutes=minutes,
            progress=report,
        )
    write_json(document, out)
    if json:
        print_json(document)
        return
    table: list[list[str]] = []
    for batch, times in zip(document["batches"], document["median_s"], strict=True):
        for context, row in zip(document["contexts"], times, strict=True):
            table.append([str(batch), str(context), *("-" if t is None else f"{1000 * t:.3f}" for t in row)])
    columns = ["batch", "context", *(f"{n} tokens" for n in document["tokens"])]
    print_table(f"{document['model']}: milliseconds per pass", columns, table, labels=2)


def scripted(
    target: Annotated[str, typer.Argument(help="Target shape; `realrun shapes` lists them.", show_default=False)],
    draft: Annotated[str, typer.Argument(help="Drafter shape.", show_default=False)],
    trace: Annotated[Path, typer.Argument(help="Trace that says what is accepted.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write, JSON.", show_default=False)],
    context: Annotated[int, typer.Option(help="Tokens of random text before every prompt.", min=0)] = 0,
    trials: TrialsOption = 100,
    repeats: RepeatsOption = 3,
    device: DeviceOption = "cuda",
    dtype: DtypeOption = "bfloat16",
    smoke_test: SmokeTestOption = False,
    minutes: MinutesOption = None,
    seed: SeedOption = 0,
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    """Predicted against measured speedup at true shapes, with acceptance scripted by a trace.

    Weights are random, all compute is real; what is accepted, and what a policy sees of each
    drafted token, is read from the trace. Policies are tuned on one half of it, run on the other.
    """
    from realrun.validation.scripted.run import run_scripted
    from realrun.validation.timing import check_repeats
    from specsim.files import check_writable, write_json
    from specsim.trace.files import read_plain_trace

    check_repeats(repeats)
    check_new(out, overwrite=overwrite)
    check_writable(out)
    with progress_bar() as report:
        document = run_scripted(
            target,
            draft,
            read_plain_trace(trace),
            context=context,
            trials=trials,
            repeats=repeats,
            device=device,
            dtype=dtype,
            smoke=smoke_test,
            seed=seed,
            minutes=minutes,
            progress=report,
        )
    write_json(document, out)
    if json:
        print_json(document)
        return
    rows = [
        [r["label"], r["role"], f"{r['predicted']['estimate']:.3f}", f"{r['measured']['estimate']:.3f}",
         f"{r['error_percent']:+.1f}", f"{r['rounds_identical_percent']:.2f}", f"{r['tau']:.2f}",
         f"{100 * r['oracle_regret']:.1f} %"]
        for r in document["rows"]
    ]  # fmt: skip
    columns = ["policy", "settings", "predicted", "measured", "error %", "rounds identical %", "tau", "regret"]
    print_table(f"{document['target']} + {document['drafter']}, context {context}", columns, rows)
    print(f"median absolute error: {document['median_abs_error_percent']:.2f} %")
    if document["done"]["stopped_early"]:
        done = document["done"]
        print(f"out of time: {done['sequence_runs']} of {done['sequence_runs_asked']} sequence runs were made")


def _numbers(option: str, text: str | None, default: Any) -> list[int]:
    return list(default) if text is None else parse_numbers(text, option, int, "1,8,64")
