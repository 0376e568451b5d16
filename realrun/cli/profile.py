"""`realrun profile`, `realrun probe` and `realrun batch-profile`: what rounds of a pair cost on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from realrun.cli.options import (
    DepthSettings,
    MachineSettings,
    PairSettings,
    SamplingSettings,
    TimedSettings,
    TokenizerSettings,
    refuse_beside,
)
from specsim.cli.command import Answer
from specsim.cli.console import claim_file, parse_share, print_table, progress_bar
from specsim.cli.options import OVERWRITE_FILE_HELP, SeedSettings
from specsim.io.settings import argument, setting

if TYPE_CHECKING:
    from specsim.trace.trace import Trace

Options = TypeVar("Options", "ProfileOptions", "BatchProfileOptions")

FROM_TRACE = ("contexts", "max_draft_tokens", "tree_nodes", "mode", "temperature", "top_p", "top_k")  # by --for


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(SamplingSettings, DepthSettings, SeedSettings):
    """What to measure, and where to write it."""

    out: Path = argument("Profile to write, JSON.")
    for_: Path | None = setting(
        None,
        "Take contexts, draft length, sampling and, if it holds trees, their size from this trace of the pair, so that "
        "the profile covers everything recorded there.",
        metavar="TRACE",
    )
    contexts: tuple[int, ...] = setting((32, 64, 128, 256), "Cached tokens to measure at, comma-separated.")
    precision: str = setting(
        "1%", "Measure until the 95 % interval of every time is this narrow: half-width, relative to the time."
    )
    minutes: float = setting(2.0, "Stop after so many minutes; 0: after the fewest rounds.", low=0)
    tree_nodes: int = setting(
        64, "Largest draft tree to measure, without the pending token; 0: no trees.", low=0, high=510
    )
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def profile(ctx: typer.Context, pair: PairSettings, options: ProfileOptions, machine: TimedSettings) -> Answer:
    """Measure the costs of decoding steps.

    Measures draft steps, verification of 1 to D+1 tokens and of trees, policy steps and round overhead. Contexts and
    sizes take turns, so that all of them see the same machine.

    Example: realrun profile profile.json --for TRACE --target MODEL --draft-model SMALL_MODEL
    """
    from realrun.measure.profile import profile as run_profile
    from realrun.measure.reuse import check_pair, sampler_of
    from realrun.measure.rounds import MAX_TREE_TOKENS
    from realrun.measure.sweeps import check_contexts
    from specsim.io.files import write_json

    machine.check()
    precision = parse_share(options.precision, "--precision", "1%")
    check_contexts(options.contexts)
    claim_file(options.out, overwrite=options.overwrite)
    sampler, nodes = options.sampler(options.seed), options.tree_nodes
    trace, options = _covering(ctx, options, FROM_TRACE)
    if trace is not None:
        sampler = sampler_of(trace, str(options.for_))
        if trace.tree is not None:
            nodes = min(trace.tree.nodes, MAX_TREE_TOKENS - 1)
        elif trace.true_rank is None:  # without which no static tree is replayed either
            nodes = 0
    loaded = pair.load(machine)
    if trace is not None:
        check_pair(trace, loaded, str(options.for_))
    with machine.in_use(), progress_bar() as report:
        document = run_profile(
            loaded,
            contexts=options.contexts,
            depth=options.max_draft_tokens,
            precision=precision,
            limit_s=60 * options.minutes,
            sampler=sampler,
            seed=options.seed,
            tree_tokens=nodes and nodes + 1,
            progress=partial(report, "precise times"),
        )
    write_json(document, options.out)
    return Answer(document, partial(_print_profile, document))


def _covering(ctx: typer.Context, options: Options, decided: Sequence[str]) -> tuple[Trace | None, Options]:
    from realrun.measure.profile import contexts_between
    from specsim.cost.table import context_range
    from specsim.trace.files import read_trace

    if options.for_ is None:
        return None, options
    refuse_beside(ctx, "for_", decided)
    trace = read_trace(options.for_)
    contexts = tuple(contexts_between(*context_range(trace)))
    return trace, replace(options, contexts=contexts, max_draft_tokens=trace.depth)


def _print_profile(document: dict[str, Any]) -> None:
    median = document["median_s"]
    depth = len(median["draft_step"])  # less than asked for where the drafter goes no further
    seconds = {
        "draft step": [fmean(steps) for steps in zip(*median["draft_step"], strict=True)],
        "baseline step": median["autoregressive"],
        **{f"verify {size + 1}": median["verify"][size] for size in (0, depth // 2, depth)},
    }
    if "tree" in median:
        seconds[f"verify tree of {median['tree']['sizes'][-1] - 1}"] = median["tree"]["verify"][-1]
    rows = [
        [str(context), *(f"{1e3 * column[number]:.2f}" for column in seconds.values())]
        for number, context in enumerate(document["contexts"])
    ]
    print_table(f"{document['provenance']['device']}, median milliseconds", ["context", *seconds], rows)
    precision = document["precision"]
    widths = [
        f"{name} {'unknown' if precision[name] is None else f'{100 * precision[name]:.1f} %'}"
        for name in ("median", "largest")
    ]
    print(
        f"{precision['precise']} of {precision['times']} times are known within {100 * precision['asked']:g} % "
        f"(95 % intervals): {', '.join(widths)}"
    )


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(SamplingSettings, SeedSettings):
    """What to probe, and where to write it."""

    out: Path | None = setting(None, "Probe to write, JSON.")
    contexts: tuple[int, ...] = setting((64, 128), "Cached tokens to measure at, comma-separated.")
    seconds: float = setting(15.0, "Stop after so many seconds; 0: after the fewest rounds.", low=0)
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def probe(pair: PairSettings, options: ProbeOptions, machine: TimedSettings) -> Answer:
    """Measure the machine's state in 15 seconds.

    Measures passes over one to five tokens, draft steps and decoding steps in turns. `specsim cost calibrate` rescales
    a profile of the same pair to this state.

    Example: realrun probe --out probe.json --target MODEL --draft-model SMALL_MODEL
    """
    from realrun.measure.probe import probe as run_probe
    from realrun.measure.sweeps import check_contexts
    from specsim.io.files import write_json

    machine.check()
    check_contexts(options.contexts)
    if options.out is not None:
        claim_file(options.out, overwrite=options.overwrite)
    sampler = options.sampler(options.seed)
    loaded = pair.load(machine)
    with machine.in_use(), progress_bar() as report:
        document = run_probe(
            loaded,
            contexts=options.contexts,
            limit_s=options.seconds,
            sampler=sampler,
            seed=options.seed,
            progress=partial(report, "probe, seconds"),
        )
    if options.out is not None:
        write_json(document, options.out)
    return Answer(document, partial(_print_probe, document))


def _print_probe(document: dict[str, Any]) -> None:
    seconds, widths = document["mean_s"], document["relative_half_width"]
    *passes, step = map(fmean, [*seconds["verify"], seconds["autoregressive"]])
    draft_step = fmean(map(fmean, seconds["draft_step"]))
    known = [*widths["verify"], widths["autoregressive"], widths["draft_step"] or 0.0]
    others = document["load"]["others_percent"]
    print(
        f"passes of 1 to {len(passes)} tokens {', '.join(f'{1e3 * s:.2f}' for s in passes)} ms, "
        f"draft step {1e3 * draft_step:.3g} ms, decoding step {1e3 * step:.2f} ms "
        f"at {' and '.join(map(str, document['contexts']))} cached tokens, all within {100 * max(known):.1f} %"
        + ("" if others is None else f"; other processes used {others:.0f} % of the CPUs")
    )


@dataclass(frozen=True, kw_only=True)
class BatchProfileOptions(SeedSettings):
    """What to measure of batches, and where to write it."""

    out: Path = argument("Batch profile to write, JSON.")
    for_: Path | None = setting(None, "Take contexts and draft length from this trace of the pair.", metavar="TRACE")
    batches: tuple[int, ...] = setting((1, 2, 4, 8), "Batch sizes, starting at 1.")
    contexts: tuple[int, ...] = setting((32, 128, 256), "Cached tokens to measure at, comma-separated.")
    max_draft_tokens: int = setting(8, "Maximum draft length.", low=1, high=255)
    repeats: int = setting(20, "Timed rounds per draft length, context and batch size.", low=2)
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


def batch_profile(
    ctx: typer.Context, models: TokenizerSettings, options: BatchProfileOptions, machine: MachineSettings
) -> Answer:
    """Measure what batched decoding steps cost.

    Sequences are decoded together with greedy chains of a draft model. `specsim serve` takes the profile as its costs:
    it finds the best draft length per batch size on this machine.

    Example: realrun batch-profile batches.json --for TRACE --target MODEL --draft-model SMALL_MODEL
    """
    from realrun.measure.batches import profile_batches
    from realrun.measure.reuse import check_pair
    from specsim.io.files import write_json

    claim_file(options.out, overwrite=options.overwrite)
    trace, options = _covering(ctx, options, ("contexts", "max_draft_tokens"))
    pair = models.load(machine)
    if trace is not None:
        check_pair(trace, pair, str(options.for_))
    with progress_bar() as report:
        document = profile_batches(
            pair,
            batches=options.batches,
            contexts=options.contexts,
            depth=options.max_draft_tokens,
            repeats=options.repeats,
            seed=options.seed,
            progress=partial(report, "probes"),
        )
    write_json(document, options.out)
    return Answer(document, partial(_print_batch_profile, document))


def _print_batch_profile(document: dict[str, Any]) -> None:
    contexts, draft_s, verify_s = document["contexts"], document["draft_s"], document["verify_s"]
    middle = len(contexts) // 2
    rows = [
        [f"{batch}", *(f"{1e3 * seconds:.2f}" for seconds in (drafts[middle][0], *passes[middle]))]
        for batch, drafts, passes in zip(document["batches"], draft_s, verify_s, strict=True)
    ]
    columns = ["batch", "first draft step", *(f"pass of {size}" for size in document["tokens"])]
    floor = document["noise_floor"]
    noise = "" if floor is None else f"; noise floor {100 * floor:.1f} %"
    title = f"{document['provenance']['device']}, milliseconds at context {contexts[middle]}{noise}"
    print_table(title, columns, rows)
