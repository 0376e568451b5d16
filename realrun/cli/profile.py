"""`realrun profile` and `realrun batch-profile`: what the rounds of a pair cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from realrun.cli.options import (
    ClockName,
    ClockOption,
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
    TopKOption,
    TopPOption,
    load,
    refuse_beside,
)
from specsim.cli.console import OverwriteFileOption, check_new, parse_numbers, print_json, print_table, progress_bar

FROM_TRACE = (
    "contexts",
    "max_draft_tokens",
    "tree_nodes",
    "mode",
    "temperature",
    "top_p",
    "top_k",
)  # what --for decides


def profile(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(help="Profile to write, JSON.", show_default=False)],
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    drafter: DrafterOption = "model",
    predictor: PredictorOption = "auto",
    for_: Annotated[
        Path | None,
        typer.Option(
            "--for",
            help="A trace of this pair: contexts, the longest draft, the largest tree and how tokens are chosen are "
            "taken from it, so that the profile prices all that is recorded there.",
            metavar="TRACE",
            show_default=False,
        ),
    ] = None,
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
    top_k: TopKOption = 0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    clock: ClockOption = ClockName.wall,
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    """Measure draft steps, verification of 1..D+1 tokens and of trees, policy steps and round overhead.

    Example: realrun profile profile.json --for TRACE --target MODEL --draft-model SMALL_MODEL
    """
    from realrun.decode.sampling import Sampler
    from realrun.lm.clock import check_clock, use_clock
    from realrun.lm.kernels import use_kernels
    from realrun.profiling.profile import contexts_between
    from realrun.profiling.profile import profile as run_profile
    from realrun.profiling.trees import MAX_TREE_TOKENS
    from realrun.recording.again import check_pair, sampler_of
    from specsim.cost.contexts import context_range
    from specsim.files import check_writable, write_json
    from specsim.trace.files import read_trace

    check_clock(clock.value, device, threads)
    check_new(out, overwrite=overwrite)
    check_writable(out)
    trace = None
    if for_ is None:
        grid = parse_numbers(contexts, "--contexts", int, "64,128,256")
        sampler = Sampler(mode.value, temperature, seed, top_p, top_k)
    else:
        refuse_beside(ctx, "for_", FROM_TRACE)
        trace = read_trace(for_)
        grid, sampler = contexts_between(*context_range(trace)), sampler_of(trace, str(for_))
        max_draft_tokens = trace.depth
        if trace.tree is not None:
            tree_nodes = min(trace.tree.nodes, MAX_TREE_TOKENS - 1)
        elif trace.true_rank is None:  # without which no static tree is replayed either
            tree_nodes = 0
    where = target, draft_model, device, dtype, threads
    pair = load(*where, predictor, drafter, allow_tokenizer_difference=allow_tokenizer_difference)
    if trace is not None:
        check_pair(trace, pair, str(for_))
    with use_kernels(kernels.value), use_clock(clock.value), progress_bar() as report:
        document = run_profile(
            pair,
            contexts=grid,
            depth=max_draft_tokens,
            repeats=repeats,
            sampler=sampler,
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


def batch_profile(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(help="Batch profile to write, JSON.", show_default=False)],
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    for_: Annotated[
        Path | None,
        typer.Option(
            "--for",
            help="A trace of this pair, from which contexts and the longest draft are taken.",
            metavar="TRACE",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[str, typer.Option(help="Sequences decoded together, from 1 on.")] = "1,2,4,8",
    contexts: Annotated[str, typer.Option(help="Cached tokens to measure at, comma-separated.")] = "32,128,256",
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft in tokens.", min=1, max=255)] = 8,
    repeats: Annotated[int, typer.Option(help="Timed rounds per draft length, context and batch.", min=2)] = 20,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    overwrite: OverwriteFileOption = False,
    json: JsonOption = False,
) -> None:
    """Measure rounds of several sequences decoded together, greedy chains of a draft model.

    `specsim serve` takes the profile as its costs: for the best draft length per batch on this
    machine, and what a batch gains.

    Example: realrun batch-profile batches.json --for TRACE --target MODEL --draft-model SMALL_MODEL
    """
    from realrun.profiling.batches import profile_batches
    from realrun.profiling.profile import contexts_between
    from realrun.recording.again import check_pair
    from specsim.cost.contexts import context_range
    from specsim.files import check_writable, write_json
    from specsim.trace.files import read_trace

    check_new(out, overwrite=overwrite)
    check_writable(out)
    sizes, grid = (
        parse_numbers(batches, "--batches", int, "1,2,4,8"),
        parse_numbers(contexts, "--contexts", int, "64,128"),
    )
    trace = None
    if for_ is not None:
        refuse_beside(ctx, "for_", ("contexts", "max_draft_tokens"))
        trace = read_trace(for_)
        grid, max_draft_tokens = contexts_between(*context_range(trace)), trace.depth
    pair = load(target, draft_model, device, dtype, threads, allow_tokenizer_difference=allow_tokenizer_difference)
    if trace is not None:
        check_pair(trace, pair, str(for_))
    with progress_bar() as report:
        document = profile_batches(
            pair,
            batches=sizes,
            contexts=grid,
            depth=max_draft_tokens,
            repeats=repeats,
            seed=seed,
            progress=lambda done, total: report("probes", done, total),
        )
    write_json(document, out)
    if json:
        print_json(document)
        return
    middle = len(grid) // 2
    rows = [
        [f"{batch}", *(f"{1e3 * seconds:.2f}" for seconds in (drafts[middle][0], *passes[middle]))]
        for batch, drafts, passes in zip(sizes, document["draft_s"], document["verify_s"], strict=True)
    ]
    columns = ["batch", "first draft step", *(f"pass of {size}" for size in document["tokens"])]
    floor = document["noise_floor"]
    noise = "" if floor is None else f"; noise floor {100 * floor:.1f} %"
    print_table(f"{document['provenance']['device']}, milliseconds at context {grid[middle]}{noise}", columns, rows)
