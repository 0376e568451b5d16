"""`specsim serve`: batches, and a server under load."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import typer

from specsim.cli.command import Answer, command
from specsim.cli.console import parse_settings, print_notes, print_table, progress_bar
from specsim.cli.options import LEARNING_SHARE_HELP, SET_HELP, BatchCostSettings, SeedSettings
from specsim.cost.batches import Pad
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting
from specsim.serving.presets import SERVERS, ServerName

if TYPE_CHECKING:
    from specsim.serving.latency import ServingSummary
    from specsim.serving.serve import BatchResults, DraftSchedule, ServerResult

SERVER_HELP = "Engine whose scheduler fills each step (default: that of --engine, or vllm)."
PAD_HELP = (
    "How the engine pads ragged batches: every draft to the longest, or passes to CUDA graphs, by their tokens or "
    "sequences (default: as the engine does)."
)


def _server(source: BatchCostSettings, asked: ServerName | None) -> ServerName:
    """The engine whose scheduler is simulated: as asked, else that of the costs, else vLLM."""
    own = str(source.engine or "")
    return asked or (cast(ServerName, own) if own in SERVERS else "vllm")


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(SeedSettings):
    """Which policy runs, in which batches or under which load."""

    policy: str = setting(
        "fixed_k",
        "Chain or static-tree policy, see `specsim policies`; or a rule over all requests: "
        "adaptive_verification, sglang_adaptive, sglang_throughput, dspark, turbospec, budget, or your own FILE.py.",
    )
    set_: list[str] = setting([], SET_HELP, metavar="NAME=VALUE")
    schedule: str = setting("", "K by batch size instead of a policy: 1:5,4:3,16:0.", metavar="BATCH:K,...")
    batch: tuple[int, ...] | None = setting(None, "Batch sizes to decode in lockstep (default: 1,2,4,8,16,32).")
    arrivals: str = setting(
        "",
        "Serve by continuous batching: poisson:RATE (requests per second), closed:USERS, or a FILE of recorded "
        "arrivals (Azure, BurstGPT: .csv; Mooncake, Qwen-Bailian: .jsonl).",
        metavar="ARRIVALS",
    )
    tuning_share: float = setting(0.5, LEARNING_SHARE_HELP)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Settings):
    """The server and its load, as `specsim.serve` takes them; None: the default."""

    requests: int | None = setting(None, "Number of requests (default: 1000, or all in the arrivals file).", low=1)
    slots: int | None = setting(None, "Maximum batch size of the server (default: 256).", low=1)
    server: ServerName | None = setting(None, SERVER_HELP)
    kv_tokens: int | None = setting(None, "Tokens that fit into the KV cache (default: unlimited).", low=1)
    block_tokens: int | None = setting(
        None,
        "Tokens of a cache block, taken as needed, with preemption as in vLLM (default: reserve whole requests).",
        low=1,
    )
    step_tokens: int | None = setting(
        None,
        "Token budget of a step, as vLLM's max_num_batched_tokens (default: the engine's on an 80 GB GPU).",
        low=1,
    )
    pad: Pad | None = setting(None, PAD_HELP)
    tpot_ms: float | None = setting(
        None, "Goodput: maximum milliseconds per output token (TPOT) of a good request.", low=0
    )
    ttft_ms: float | None = setting(None, "Goodput: maximum milliseconds to its first token (TTFT).", low=0)

    @property
    def set_options(self) -> dict[str, Any]:
        """The options that were set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def simulate(source: BatchCostSettings, options: SimulateOptions, limits: ServerOptions) -> Answer:
    """Simulate batches or a server under load.

    Compares speculation with none. In lockstep, all sequences of a batch start together, every round waits for the
    longest draft, and the batch shrinks as texts end (`specsim serve schedule` keeps batches full).

    With --arrivals, requests arrive, wait for a slot and for memory, are prefilled while others decode, and leave when
    they are done. The first tenth of the requests (warm-up) and the end, when no more requests arrive, are left out.

    Example: specsim serve simulate TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --set k=3

    Example: specsim serve simulate TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --policy turbospec
    --arrivals poisson:20 --slots 64 --tpot-ms 10
    """
    from specsim.serving.draft_length import as_schedule
    from specsim.serving.serve import BATCHES, serve, serve_batches

    if options.arrivals and options.batch:
        raise InputError("--batch is for lockstep; with --arrivals the load decides, so give --slots instead")
    if limits.set_options and not options.arrivals:
        flag = "--" + next(iter(limits.set_options)).replace("_", "-")
        raise InputError(f"{flag} needs a server; give --arrivals, such as poisson:20, closed:32 or a file")
    if options.schedule and (options.policy != "fixed_k" or options.set_):
        raise InputError("--schedule replaces --policy and --set; give either")
    source = source.completed()
    policy = as_schedule(options.schedule) if options.schedule else options.policy
    shared: dict[str, Any] = {"tuning_share": options.tuning_share, "seed": options.seed}
    shared |= parse_settings(options.set_)
    if not options.arrivals:
        batches = serve_batches(
            source.served, source.costs(source.cost), policy, batches=options.batch or BATCHES, **shared
        )
        return Answer(batches.as_dict(), partial(_print_batches, batches))
    shared |= {**limits.set_options, "server": _server(source, limits.server)}
    served = serve(source.served, source.costs(source.cost), policy, arrivals=options.arrivals, **shared)
    return Answer(served.as_dict(), partial(_print_serving, served))


def _print_batches(results: BatchResults) -> None:
    rows = [
        [
            str(on.batch),
            str(speedup),
            f"{off.tokens_per_s:,.0f}",
            f"{on.tokens_per_s:,.0f}",
            f"{1e3 * on.total_s / on.as_dict()['rounds']:.2f}",
            f"{on.mean_batch:.1f}",
        ]
        for on, off, speedup in results.batches
    ]
    columns = ["batch", "speedup [95 %]", "tok/s off", "tok/s on", "ms/round", "mean batch"]
    learned = [] if results.learned_on else ["off: without speculation"]
    title = f"{results.label}, {results.sequences} sequences in lockstep"
    print_table("; ".join([title, *learned, *results.conditions]), columns, rows)
    print_notes(results.cost_notes)


def _print_serving(result: ServerResult) -> None:
    """Print a server's figures without speculation and with it."""
    off, on = result.baseline, result.speculation
    rows = [[name, text(off), text(on)] for name, text in QUANTITIES if text(on)]
    left_out = f", {result.left_out} without output left out" if result.left_out else ""
    title = f"{on.label}, {on.requests} requests ({result.arrivals}){left_out}"
    print_table(title, ["quantity", "off", "on"], rows)
    print_notes(result.cost_notes)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _good(run: ServingSummary) -> str:
    if run.goodput_per_s is None or run.within is None:
        return ""
    return f"{run.goodput_per_s:,.2f} ({100 * run.within:.0f} %)"


QUANTITIES: list[tuple[str, Any]] = [
    ("output tokens per second", lambda run: f"{run.tokens_per_s:,.0f}"),
    ("requests per second", lambda run: f"{run.requests_per_s:,.2f}"),
    ("goodput, requests per second", _good),
    ("mean batch", lambda run: f"{run.mean_batch:.1f}"),
    ("tokens per round", lambda run: f"{run.tokens_per_round:.2f}"),
    ("drafted per round", lambda run: f"{run.mean_drafted:.2f}"),
    *[
        (f"{what}, {when}, ms", lambda run, name=name, field=field: _ms(getattr(getattr(run, field), name)))
        for what, field in (("time per output token", "tpot_s"), ("time to first token", "ttft_s"))
        for when, name in (("mean", "mean"), ("median", "p50"), ("90 %", "p90"), ("99 %", "p99"))
    ],
    ("preemptions", lambda run: f"{run.preemptions:,}" if run.preemptions else ""),
    ("requests measured", lambda run: f"{run.measured:,}"),
]


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(SeedSettings):
    """Which batch sizes, contexts and draft lengths are compared."""

    batch: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "Batch sizes, increasing.")
    context: tuple[int, ...] | None = setting(
        None, "Cached tokens of every sequence, as 1024,8192 (default: those of the trace)."
    )
    max_draft_tokens: int | None = setting(
        None, "Maximum draft length K (default: 8, or the depth of the trace).", low=1, high=255
    )
    policy: list[str] = setting(
        [], "Also rank this policy (chain or static tree) with its default settings; repeat for more."
    )
    tuning_share: float = setting(0.5, LEARNING_SHARE_HELP)


def schedule(source: BatchCostSettings, options: ScheduleOptions) -> Answer:
    """Find the best draft length per batch size.

    Finds the best K for each batch size and context, and the batch size beyond which speculation loses. Batches are
    full: a finished sequence makes room for the next. The table ends before the first batch that does not fit into the
    GPU's memory. Every K up to --max-draft-tokens is compared, and TurboSpec, which chooses K in every round by the
    load and a moving estimate of acceptance. Intervals (95 %) are over sequences, and hold the error of costs on a GPU;
    as in `specsim advise`, speedups are corrected for what is known of it. The schedule is printed as
    `specsim serve simulate --schedule` takes it; --json also has vLLM's ranges [first batch, last batch, K].

    Example: specsim serve schedule TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --context 1024

    Example: specsim serve schedule vllm.log --gpu h100 --target llama-3.1-8b --drafter eagle3 --engine vllm
    """
    from specsim.cost.files import as_cost, with_batch
    from specsim.serving.serve import serve_schedule

    source = source.completed()
    costs = as_cost(source.costs(source.cost))
    with progress_bar() as bar:
        schedule = serve_schedule(
            source.served,
            costs,
            batches=options.batch,
            contexts=options.context,
            max_draft_tokens=options.max_draft_tokens,
            policies=options.policy,
            tuning_share=options.tuning_share,
            seed=options.seed,
            progress=partial(bar, "cells"),
        )

    known = all(with_batch(costs, cell.batch).error_known for cell in schedule.cells)

    def show() -> None:
        for number in range(len(schedule.contexts)):
            _print_context(schedule, number, known=known)
        print_notes([*source.counts_notes, *schedule.cost_notes])

    at_first_batch = with_batch(costs, options.batch[0])
    return Answer({**schedule.as_dict(), **source.cost_facts(source.cost, at_first_batch)}, show)


def _print_context(schedule: DraftSchedule, number: int, *, known: bool) -> None:
    """Print the table of a context, its schedule, and where speculation stops paying.

    known : whether the error of speedups with such costs is; else no interval is shown
    """
    context, even = schedule.contexts[number], schedule.break_even[number]
    others = [label for label in schedule.cells[0].speedup if label not in schedule.lengths]
    rows = []
    for cell in schedule.cells:
        if cell.context == context:
            best = max(schedule.lengths, key=lambda label: cell.speedup[label].estimate)
            rest = [f"{cell.speedup[label].estimate:.3f}" for label in others]
            row = [
                f"{cell.batch}",
                f"{schedule.lengths[best]}",
                str(cell.speedup[best]) if known else f"{float(cell.speedup[best]):.3f}",
                *rest,
            ]
            rows.append([*row, f"{cell.baseline_tokens_per_s:,.0f}"])
    where = "the trace's contexts" if context is None else f"context {context:,}"
    columns = [
        "batch",
        "K",
        "speedup [95 %]" if known else "speedup, error unknown",
        *(re.split(r"[ (]", label)[0] for label in others),
        "tok/s off",
    ]
    print_table(f"Best K in full batches, {where}", columns, rows)
    lengths = ",".join(f"{batch}:{k}" for batch, k in schedule.schedule(context).items())
    print(f"schedule {lengths}")
    print(even.sentence if known else even.sentence.partition(" [")[0])


serve = typer.Typer(
    help="Simulate speculation on a server.\n\n"
    "Several sequences share every pass: what speculation gains in batches and under load, and the best draft length "
    "for each batch size. Needs a batch-aware cost model: linear, such as specdecode-bench-llama3.1-8b-eagle-h100 "
    "(`specsim cost list` names those that ship), roofline, or a profile of `realrun batch-profile`.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _command in (simulate, schedule):
    command(serve)(_command)
