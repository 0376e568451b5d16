"""`specsim serve simulate`: a policy in batches, or on a server under load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.console import parse_numbers, parse_settings, print_json, print_notes, print_table
from specsim.cli.options import BatchCostOption, JsonOption, LearningShareOption, SeedOption, SetOption, TraceArgument
from specsim.errors import InputError

if TYPE_CHECKING:
    from specsim.api.serve import BatchResults, ServerResult
    from specsim.serving.latency import ServingSummary


def simulate(
    trace: TraceArgument,
    cost: BatchCostOption,
    policy: Annotated[
        str,
        typer.Option(
            help="A policy of chains or static trees, see `specsim policies`; or goodput, by load and acceptance."
        ),
    ] = "fixed_k",
    set_: SetOption = [],  # noqa: B006 (typer reads the default, it is never changed)
    schedule: Annotated[
        str,
        typer.Option(help="In place of a policy, K from each batch on: 1:5,4:3,16:0.", metavar="BATCH:K,..."),
    ] = "",
    batch: Annotated[str, typer.Option(help="Batches to decode in lockstep; default 1,2,4,8,16,32.")] = "",
    arrivals: Annotated[
        str,
        typer.Option(
            help="Serve by continuous batching: poisson:RATE (requests per second), closed:USERS, or a FILE of "
            "recorded ones (Azure, BurstGPT: .csv; Mooncake, Qwen-Bailian: .jsonl).",
            metavar="ARRIVALS",
        ),
    ] = "",
    requests: Annotated[int | None, typer.Option(help="Requests to serve; default 1000, of a file all.", min=1)] = None,
    slots: Annotated[int | None, typer.Option(help="Most sequences of the server's batch; default 256.", min=1)] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the server's KV cache holds; without, it is never full.", min=1)
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(help="Goodput: most milliseconds per output token of a good request.", min=0)
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Goodput: most milliseconds to its first token.", min=0)] = None,
    tuning_share: LearningShareOption = 0.5,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Simulate batches or a server, with speculation and without.

    In lockstep, so many sequences start together, every round waits for the longest draft,
    and the batch shrinks as texts end (`specsim serve schedule` has batches that stay full).

    With --arrivals, requests come, wait for a slot and for memory, are prefilled while others
    decode, and leave when they are done. The first tenth of the requests warms the server up
    and is left out, as is its end, once no more requests come.

    Example: specsim serve simulate TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --set k=3

    Example: specsim serve simulate TRACE --cost specdecode-bench-llama3.1-8b-eagle-h100 --policy goodput
    --arrivals poisson:20 --slots 64 --tpot-ms 10
    """
    from specsim.api.serve import SLOTS, serve, serve_batches
    from specsim.serving.draft_length import as_schedule

    _check_options(batch, arrivals, requests=requests, slots=slots, kv=kv_tokens, tpot=tpot_ms, ttft=ttft_ms)
    if schedule and (policy != "fixed_k" or set_):
        raise InputError("--schedule stands in place of --policy and --set; give one of them")
    arm = as_schedule(schedule) if schedule else policy
    shared: dict[str, Any] = {"tuning_share": tuning_share, "seed": seed, **parse_settings(set_)}
    if not arrivals:
        sizes = parse_numbers(batch or "1,2,4,8,16,32", "--batch", int, "1,2,4,8")
        _show_batches(serve_batches(trace, cost, arm, batches=sizes, **shared), json=json)
        return
    found = serve(
        trace,
        cost,
        arm,
        arrivals=arrivals,
        requests=requests,
        slots=slots or SLOTS,
        kv_tokens=kv_tokens,
        tpot_ms=tpot_ms,
        ttft_ms=ttft_ms,
        **shared,
    )
    _show_serving(found, json=json)


def _check_options(batch: str, arrivals: str, **of_serving: object) -> None:
    """InputError for options that would do nothing."""
    if arrivals and batch:
        raise InputError("--batch is of lockstep; with --arrivals the load decides, give --slots")
    names = {
        "requests": "--requests",
        "slots": "--slots",
        "kv": "--kv-tokens",
        "tpot": "--tpot-ms",
        "ttft": "--ttft-ms",
    }
    given = [names[key] for key, value in of_serving.items() if value is not None]
    if given and not arrivals:
        raise InputError(f"{given[0]} is of a server; give --arrivals, such as poisson:20, closed:32 or a file")


def _show_batches(found: BatchResults, *, json: bool) -> None:
    if json:
        print_json(found.as_dict())
        return
    rows = [
        [
            str(on.batch),
            str(speedup),
            f"{off.tokens_per_s:,.0f}",
            f"{on.tokens_per_s:,.0f}",
            f"{1e3 * on.total_s / on.as_dict()['rounds']:.2f}",
            f"{on.mean_batch:.1f}",
        ]
        for on, off, speedup in found.batches
    ]
    columns = ["batch", "speedup [95 %]", "tok/s off", "tok/s on", "ms/round", "mean batch"]
    learned = [] if found.learned_on else ["off: without speculation"]
    title = f"{found.label}, {found.sequences} sequences in lockstep"
    print_table("; ".join([title, *learned, *found.conditions]), columns, rows)
    print_notes(found.cost_notes)


def _show_serving(found: ServerResult, *, json: bool) -> None:
    """A server's figures without speculation and with it."""
    if json:
        print_json(found.as_dict())
        return
    off, on = found.baseline, found.speculation
    rows = [[name, text(off), text(on)] for name, text in QUANTITIES if text(on)]
    left = f", {found.left_out} without output left out" if found.left_out else ""
    approximate = "; approximate: rejection sampling" if found.approximate else ""
    title = f"{on.label}, {on.requests} requests ({found.arrivals}){left}{approximate}"
    print_table(title, ["quantity", "off", "on"], rows)
    print_notes(found.cost_notes)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _good(one: ServingSummary) -> str:
    if one.goodput_per_s is None or one.within is None:
        return ""
    return f"{one.goodput_per_s:,.2f} ({100 * one.within:.0f} %)"


QUANTITIES: list[tuple[str, Any]] = [
    ("output tokens per second", lambda one: f"{one.tokens_per_s:,.0f}"),
    ("requests per second", lambda one: f"{one.requests_per_s:,.2f}"),
    ("goodput, requests per second", _good),
    ("mean batch", lambda one: f"{one.mean_batch:.1f}"),
    ("tokens per round", lambda one: f"{one.tokens_per_round:.2f}"),
    ("drafted per round", lambda one: f"{one.mean_drafted:.2f}"),
    *[
        (f"{what}, {when}, ms", lambda one, name=name, field=field: _ms(getattr(getattr(one, field), name)))
        for what, field in (("time per output token", "tpot_s"), ("time to first token", "ttft_s"))
        for when, name in (("mean", "mean"), ("median", "p50"), ("90 %", "p90"), ("99 %", "p99"))
    ],
    ("requests measured", lambda one: f"{one.measured:,}"),
]
