"""`realrun profile`: what the rounds of a pair cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from realrun.cli.options import (
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    Kernels,
    KernelsOption,
    MaxDraftTokensOption,
    Mode,
    ModeOption,
    PredictorOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TokenizerDifferenceOption,
    TopPOption,
    load,
)
from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar


def profile(
    out: Annotated[Path, typer.Argument(help="Profile to write, JSON.", show_default=False)],
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    drafter: DrafterOption = "model",
    predictor: PredictorOption = "auto",
    contexts: Annotated[str, typer.Option(help="Cached tokens to measure at, comma-separated.")] = "32,64,128,256",
    max_draft_tokens: MaxDraftTokensOption = 16,
    repeats: Annotated[int, typer.Option(help="Timed rounds per size and context.", min=2)] = 40,
    tree_nodes: Annotated[
        int,
        typer.Option(help="Largest draft tree to measure, the pending token not counted; 0: no trees.", min=0, max=510),
    ] = 64,
    mode: ModeOption = Mode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    json: JsonOption = False,
) -> None:
    """Measure draft steps, verification of 1..D+1 tokens and of trees, policy steps and round overhead."""
    from realrun.decode.sampling import Sampler
    from realrun.lm.kernels import use_kernels
    from realrun.profiling.profile import profile as run_profile
    from specsim.files import check_writable, write_json

    check_writable(out)
    grid = parse_numbers(contexts, "--contexts", int, "64,128,256")
    where = target, draft_model, device, dtype, threads
    pair = load(*where, predictor, drafter, allow_tokenizer_difference=allow_tokenizer_difference)
    with use_kernels(kernels.value), progress_bar() as report:
        document = run_profile(
            pair,
            contexts=grid,
            depth=max_draft_tokens,
            repeats=repeats,
            sampler=Sampler(mode.value, temperature, seed, top_p),
            seed=seed,
            tree_tokens=tree_nodes and tree_nodes + 1,
            progress=lambda done, total: report("profile", done, total),
        )
    write_json(document, out)
    if json:
        print_json(document)
        return
    median = document["median_s"]
    depth = len(median["draft_step"])  # less than asked for where the drafter goes no further
    rows = []
    for column, context in enumerate(grid):
        verify = [row[column] for row in median["verify"]]
        cells = [
            sum(row[column] for row in median["draft_step"]) / depth,
            median["autoregressive"][column],
            verify[0],
            verify[depth // 2],
            verify[depth],
            *([median["tree"]["verify"][-1][column]] if "tree" in median else []),
        ]
        rows.append([str(context), *(f"{1e3 * x:.2f}" for x in cells)])
    columns = [
        "context",
        "draft step",
        "autoregressive step",
        "verify 1",
        f"verify {depth // 2 + 1}",
        f"verify {depth + 1}",
        *([f"verify tree of {tree_nodes}"] if "tree" in median else []),
    ]
    print_table(f"{document['provenance']['device']}, median milliseconds", columns, rows)
