"""`specsim serve frontier`: throughput against latency over draft lengths, rules and loads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specsim.cli.command import Answer
from specsim.cli.console import parse_settings, print_notes, print_table, progress_bar
from specsim.cli.options import LEARNING_SHARE_HELP, BatchCostSettings, SeedSettings, WorkerSettings
from specsim.io.errors import InputError
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.serving.frontier import FrontierPoint, ServingFrontier

ENGINES = ("vllm", "sglang")  # that take a K by batch size, whatever it is


@dataclass(frozen=True, kw_only=True)
class FrontierOptions(SeedSettings):
    """Which rules are compared at which loads, and by what."""

    rule: list[str] = setting(
        [],
        "Compare this rule with every fixed K: budget, dspark, sglang_adaptive, turbospec, a policy, "
        "or your own FILE.py; repeat for more.",
    )
    set_: list[str] = setting([], "Setting of a rule, RULE.NAME=VALUE; repeat for more.", metavar="RULE.NAME=VALUE")
    users: tuple[int, ...] = setting((1, 4, 16, 64, 256), "Loads: users who ask again as soon as they are answered.")
    max_draft_tokens: int | None = setting(
        None, "Largest fixed K (default: 8, or the depth of the trace).", low=1, high=255
    )
    requests: int | None = setting(None, "Requests of a load (default: 8 per user, at least 200).", low=1)
    kv_tokens: int | None = setting(None, "Tokens that fit into the KV cache (default: unlimited).", low=1)
    tpot_ms: tuple[float, ...] | None = setting(
        None, "Limit on ms per output token of 90 % of the requests; several: each request's own, in turn."
    )
    pad: Literal["none", "longest", "graphs"] = setting(
        "none", "How the engine pads ragged batches: every draft to the longest, or passes to CUDA graphs."
    )
    figure: Path | None = setting(None, "Draw throughput against latency, as .png or .svg.")
    tuning_share: float = setting(0.5, LEARNING_SHARE_HELP)
    workers: WorkerSettings = setting(WorkerSettings)


def frontier(source: BatchCostSettings, options: FrontierOptions) -> Answer:
    """Compare rules by throughput and latency.

    At each load, a number of users who send the next request as soon as the last is answered, every fixed K, the rules
    and the oracle serve the same requests. The oracle knows what will be accepted, and drafts what pays: how far a rule
    is behind shows what a better rule could gain. The K that is best at each load is printed as engines take it.

    Example: specsim serve frontier example:smollm2-eagle --gpu h100 --target llama-3.1-8b --drafter eagle3
    --rule budget --rule sglang_adaptive --users 1,8,64 --set sglang_adaptive.initial_steps=1
    """
    from specsim.serving.frontier import serve_frontier

    if options.figure is not None:
        from specsim.report.tree_figures import check_figure

        check_figure(options.figure)
    settings: dict[str, dict[str, str]] = {}
    for name, value in parse_settings(options.set_).items():
        rule, dot, key = name.rpartition(".")
        if not dot:
            raise InputError(f"--set {name}: name the rule as well, such as --set budget.{name}={value}")
        settings.setdefault(rule, {})[key] = value
    with progress_bar() as bar:
        compared = serve_frontier(
            source.trace,
            source.costs(source.cost),
            options.rule,
            users=options.users,
            max_draft_tokens=options.max_draft_tokens,
            requests=options.requests,
            kv_tokens=options.kv_tokens,
            tpot_ms=options.tpot_ms or (),
            pad=options.pad,
            settings=settings,
            tuning_share=options.tuning_share,
            seed=options.seed,
            workers=options.workers.ready,
            progress=partial(bar, "servers"),
        )
    if options.figure is not None:
        compared.plot().savefig(options.figure)
    return Answer(compared.as_dict(), partial(_print, compared, options.figure))


def _print(compared: ServingFrontier, figure: Path | None) -> None:
    """Print, by load, the best fixed K, the rules and the oracle; then what engines take."""
    from specsim.engines.export import export_flags

    within = len(compared.tpot_bounds_s) > 0
    rows = []
    for users in compared.users:
        best, best_k = compared.best(users), compared.best(users, fixed=True)
        for point in compared.points:
            if point.users == users and (point.k is None or point is best_k or not point.k):
                rows.append(_row(point, best=point is best, within=within))
    columns = ["users", "policy", "tok/s", "p90 ms/token", "slower than oracle"]
    conditions = [f"{compared.sequences} sequences", *compared.conditions]
    limits = ", ".join(f"{1e3 * bound:g}" for bound in compared.tpot_bounds_s)
    title = f"Throughput against latency, {'; '.join(conditions)}" + (f"; limit {limits} ms" if limits else "")
    print_table(title, [*columns, *(["within limit"] if within else []), ""], rows)
    schedule = compared.schedule()
    print(f"schedule {','.join(f'{users}:{k}' for users, k in schedule.items())}")
    for engine in ENGINES:
        exported = export_flags(engine, schedule=schedule, largest_batch=max(512, *schedule))
        print(f"{engine}: {exported.flags}")
        if exported.file is not None:
            print(f"  {exported.path}: {exported.file}")
    print_notes(compared.cost_notes)
    if figure is not None:
        print(f"written: {figure}")


def _row(point: FrontierPoint, *, best: bool, within: bool) -> list[str]:
    from specsim.replaying.intervals import NO_SPECULATION

    summary = point.summary
    marks = ["best" if best else "", "frontier" if point.on_frontier else ""]
    cells = [
        f"{point.users}",
        summary.label if point.k is None else f"K = {point.k}" if point.k else NO_SPECULATION,
        f"{summary.tokens_per_s:,.0f}",
        f"{1e3 * point.p90_s:.2f}",
        "" if point.oracle else f"{100 * point.slower_than_oracle:.1f} %",
    ]
    share = f"{100 * summary.within:.0f} %" if summary.within is not None else ""
    return [*cells, *([share] if within else []), ", ".join(filter(None, marks))]
