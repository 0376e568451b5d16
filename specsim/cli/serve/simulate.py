"""`specsim serve simulate`: a policy in batches, or on a server under load."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from specsim.cli.command import Answer
from specsim.cli.console import parse_settings, print_notes, print_table
from specsim.cli.options import LEARNING_SHARE_HELP, SET_HELP, BatchCostSettings, SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

if TYPE_CHECKING:
    from specsim.serving.latency import ServingSummary
    from specsim.serving.serve import BatchResults, ServerResult


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(SeedSettings):
    """Which policy runs, in which batches or under which load."""

    policy: str = setting(
        "fixed_k",
        "Chain or static-tree policy, see `specsim policies`; or a rule over all requests: budget, dspark, "
        "sglang_adaptive, turbospec, or your own FILE.py.",
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
    kv_tokens: int | None = setting(None, "Tokens that fit into the KV cache (default: unlimited).", low=1)
    block_tokens: int | None = setting(
        None,
        "Tokens of a cache block, taken as needed, with preemption as in vLLM (default: reserve whole requests).",
        low=1,
    )
    step_tokens: int | None = setting(
        None,
        "Maximum tokens of a step, as vLLM's max_num_batched_tokens: chunked prefill (default: whole prompts).",
        low=1,
    )
    pad: Literal["none", "longest", "graphs"] | None = setting(
        None, "How the engine pads ragged batches: every draft to the longest, or passes to CUDA graphs."
    )
    tpot_ms: float | None = setting(
        None, "Goodput: maximum milliseconds per output token (TPOT) of a good request.", low=0
    )
    ttft_ms: float | None = setting(None, "Goodput: maximum milliseconds to its first token (TTFT).", low=0)

    @property
    def set_options(self) -> dict[str, Any]:
        """The options that were set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def simulate(source: BatchCostSettings, options: SimulateOptions, server: ServerOptions) -> Answer:
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
    if server.set_options and not options.arrivals:
        flag = "--" + next(iter(server.set_options)).replace("_", "-")
        raise InputError(f"{flag} needs a server; give --arrivals, such as poisson:20, closed:32 or a file")
    if options.schedule and (options.policy != "fixed_k" or options.set_):
        raise InputError("--schedule replaces --policy and --set; give either")
    policy = as_schedule(options.schedule) if options.schedule else options.policy
    shared: dict[str, Any] = {"tuning_share": options.tuning_share, "seed": options.seed}
    shared |= parse_settings(options.set_)
    if not options.arrivals:
        batches = serve_batches(
            source.trace, source.costs(source.cost), policy, batches=options.batch or BATCHES, **shared
        )
        return Answer(batches.as_dict(), partial(_print_batches, batches))
    served = serve(
        source.trace, source.costs(source.cost), policy, arrivals=options.arrivals, **server.set_options, **shared
    )
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
    approximate = "; approximate: rejection sampling" if result.approximate else ""
    title = f"{on.label}, {on.requests} requests ({result.arrivals}){left_out}{approximate}"
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
