"""`specsim serve simulate`: a policy in batches, or on a server under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.console import parse_numbers, parse_settings, print_json, print_notes, print_table
from specsim.cli.options import JsonOption, LearningShareOption, SeedOption, SetOption, TraceArgument
from specsim.cli.serve.arms import BatchCostOption, choose_arms, cost_notes, parse_schedule
from specsim.errors import InputError

if TYPE_CHECKING:
    from specsim.serving.arrivals import Requests
    from specsim.serving.latency import ServingSummary
    from specsim.trace.trace import Trace

REQUESTS = 1000  # to serve, where --requests does not say
SLOTS = 256  # as vLLM's max_num_seqs


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
    from specsim.cost.files import read_cost
    from specsim.serving.continuous import serve
    from specsim.serving.costs import batch_cost
    from specsim.serving.draft_length import ScheduledK
    from specsim.serving.drafts import drafts_of
    from specsim.serving.latency import summarise_run
    from specsim.trace.files import read_plain_trace

    _check_options(batch, arrivals, requests=requests, slots=slots, kv=kv_tokens, tpot=tpot_ms, ttft=ttft_ms)
    if schedule and (policy != "fixed_k" or set_):
        raise InputError("--schedule stands in place of --policy and --set; give one of them")
    model, settings = read_cost(cost), parse_settings(set_)
    priced = batch_cost(model)
    whole = read_plain_trace(trace)
    named = [] if schedule else [(policy, settings)]
    part, arms, learned_on = choose_arms(whole, model, named, tuning_share=tuning_share, seed=seed)
    arm = arms[0] if arms else ScheduledK(parse_schedule(schedule))
    about: dict[str, Any] = {"learned_on": learned_on, "sequences": part.sequences, "approximate": part.approximate}
    if not arrivals:
        sizes = parse_numbers(batch or "1,2,4,8,16,32", "--batch", int, "1,2,4,8")
        about["cost_notes"] = cost_notes(model, part, arm.max_draft_tokens, max(sizes))
        _lockstep(part, priced, arm, sizes, about, seed=seed, json=json)
        return
    asked, users = _requests(part, arrivals, requests, seed)
    longest_text = int((asked.prompt_tokens + asked.output_tokens).max())
    about["cost_notes"] = cost_notes(model, part, arm.max_draft_tokens, slots or SLOTS, (0, longest_text))
    limits: dict[str, Any] = {"slots": slots or SLOTS, "kv_tokens": kv_tokens, "users": users}
    bounds: dict[str, Any] = {
        "tpot_bound_s": None if tpot_ms is None else tpot_ms / 1e3,
        "ttft_bound_s": None if ttft_ms is None else ttft_ms / 1e3,
    }
    off, on = (
        summarise_run(serve(drafts_of(part, each, seed=seed), priced, asked, **limits), **bounds)
        for each in (None, arm)
    )
    about |= {"arrivals": arrivals, "left_out": asked.left_out, **limits, **bounds}
    _show_serving(off, on, about, json=json)


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


def _requests(trace: Trace, arrivals: str, count: int | None, seed: int) -> tuple[Requests, int | None]:
    """What is asked, and of a closed loop by how many users."""
    from specsim.serving.arrivals import recorded_requests, requests_of_trace

    kind, colon, number = arrivals.partition(":")
    if not colon or kind not in ("poisson", "closed"):
        return recorded_requests(Path(arrivals), trace, limit=count, seed=seed), None
    if kind == "poisson":
        rate = parse_numbers(number, "--arrivals poisson:", float, "poisson:20")[0]
        return requests_of_trace(trace, count or REQUESTS, rate=rate, seed=seed), None
    users = parse_numbers(number, "--arrivals closed:", int, "closed:32")[0]
    return requests_of_trace(trace, count or REQUESTS, seed=seed), users


def _lockstep(trace: Trace, cost: Any, arm: Any, sizes: list[int], about: Any, *, seed: int, json: bool) -> None:
    from specsim.serving.drafts import drafts_of, plain_drafts
    from specsim.serving.lockstep import lockstep
    from specsim.speedup.intervals import ratio_of_ratios

    drafts, plain = drafts_of(trace, arm, seed=seed), plain_drafts(trace)
    documents, rows = [], []
    for size in sizes:
        with_it, without = lockstep(drafts, cost, size), lockstep(plain, cost, size)
        speedup = ratio_of_ratios(*with_it.per_sequence(), *without.per_sequence())
        entry = {**with_it.as_dict(), "speedup": speedup.as_dict(), "baseline": without.as_dict()}
        documents.append(entry)
        rows.append(
            [
                str(size),
                str(speedup),
                f"{without.tokens_per_s:,.0f}",
                f"{with_it.tokens_per_s:,.0f}",
                f"{1e3 * with_it.total_s / entry['rounds']:.2f}",
                f"{with_it.mean_batch:.1f}",
            ]
        )
    if json:
        print_json({**about, "batches": documents})
        return
    columns = ["batch", "speedup [95 %]", "tok/s off", "tok/s on", "ms/round", "mean batch"]
    print_table(f"{drafts.label}, {trace.sequences} sequences in lockstep; {_learned(about)}", columns, rows)
    print_notes(about["cost_notes"])


def _learned(about: dict[str, Any]) -> str:
    learned = f"learned on {about['learned_on']} others" if about["learned_on"] else "off: without speculation"
    return "; ".join([learned, *_notes(about)])


def _notes(about: dict[str, Any]) -> list[str]:
    """What is to be said of the numbers."""
    return ["approximate: rejection sampling"] if about["approximate"] else []


def _show_serving(off: ServingSummary, on: ServingSummary, about: dict[str, Any], *, json: bool) -> None:
    """A server's figures without speculation and with it."""
    if json:
        print_json({**about, "baseline": off.as_dict(), "speculation": on.as_dict()})
        return
    rows = [[name, text(off), text(on)] for name, text in QUANTITIES if text(on)]
    left = f", {about['left_out']} without output left out" if about["left_out"] else ""
    title = "; ".join([on.label, f"{on.requests} requests ({about['arrivals']}){left}", *_notes(about)])
    print_table(title, ["quantity", "off", "on"], rows)
    print_notes(about["cost_notes"])


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
