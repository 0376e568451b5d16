"""The `specsim` command: replay and tune on a recorded trace. Needs no torch."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from specsim.console import parse_settings, print_json, print_table, progress_bar, run
from specsim.options import (
    BatchOption,
    CostOption,
    DraftCostOption,
    JsonOption,
    PolicyOption,
    SeedOption,
    SetOption,
    TraceArgument,
    read_costs,
)

app = typer.Typer(
    help="Simulate speculative decoding: replay a recorded trace under any policy, and tune it.\n\n"
    "Traces come from `realrun record`, costs from `realrun profile`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Results of campaigns that ship with specsim, or lie in a folder.", no_args_is_help=True)
app.add_typer(data, name="data")


class SearchKind(StrEnum):
    """How `tune` searches."""

    grid = "grid"
    optuna = "optuna"


@app.command()
def replay(
    trace: TraceArgument,
    policy: PolicyOption,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, nobody changes it)
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Replay a trace under one policy and predict its speedup.

    Example: specsim replay TRACE --policy adaedl --set gamma=0.2 --cost profile.json
    """
    from specsim.policy import make_policy
    from specsim.prediction import predict
    from specsim.trace import read_trace

    chosen = make_policy(policy, parse_settings(set_))
    prediction = predict(read_trace(trace), chosen, read_costs(cost, draft_cost, batch), seed=seed)
    document = prediction.as_dict()
    if json:
        print_json(document)
        return
    rows = [["speedup [95 % interval]", str(prediction.speedup)]]
    for key in ("v_d", "r_d", "hm", "tau", "seconds", "ar_seconds"):
        rows.append([key, f"{document[key]:.3f}"])
    for key in ("rounds", "drafted", "accepted", "output_tokens"):
        rows.append([key, f"{document[key]:,}"])
    print_table(str(chosen), ["quantity", "value"], rows)


@app.command()
def tune(
    trace: TraceArgument,
    policy: PolicyOption,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    set_: SetOption = [],  # noqa: B006
    search: Annotated[SearchKind, typer.Option(help="Even grid, or Optuna's TPE.")] = SearchKind.optuna,
    trials: Annotated[int, typer.Option(help="Configurations to try.", min=1)] = 100,
    tuning_share: Annotated[float, typer.Option(help="Share of the sequences to tune on.")] = 0.5,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Find a policy's best settings on one part of the trace, report them on the other.

    Settings given with --set are held fixed. Beside the result stand the autoregressive
    baseline, the policy's default settings and the best fixed K.
    """
    from specsim.policy import POLICIES, make_policy
    from specsim.prediction import predict
    from specsim.trace import read_trace
    from specsim.tuning import split_sequences
    from specsim.tuning import tune as run_tune

    fixed = {key: getattr(make_policy(policy, {key: value}), key) for key, value in parse_settings(set_).items()}
    kind = type(make_policy(policy))
    whole, model = read_trace(trace), read_costs(cost, draft_cost, batch)
    tuning, held = split_sequences(whole, tuning_share=tuning_share, seed=seed)
    train, holdout = whole.select(tuning), whole.select(held)
    with progress_bar() as report:
        result = run_tune(
            kind,
            train,
            holdout,
            model,
            fixed=fixed,
            search=search.value,
            trials=trials,
            seed=seed,
            progress=lambda done, total: report("tune", done, total),
        )
    untuned = dict(fixed)
    if kind is POLICIES["fixed_k"]:
        untuned.setdefault("k", min(kind().settings["k"], whole.depth))
    else:
        untuned.setdefault("max_draft", whole.depth)
    default = predict(holdout, make_policy(policy, untuned), model, seed=seed)
    fixed_k = run_tune(POLICIES["fixed_k"], train, holdout, model, search="grid", seed=seed).holdout
    if json:
        references = {"default": default.as_dict(), "best_fixed_k": fixed_k.as_dict()}
        print_json({**result.as_dict(), "references": references})
        return
    rows = [["autoregressive", "", "1.000", "", ""]]
    for label, train_speedup, prediction in (
        ("tuned", f"{result.train.speedup.estimate:.3f}", result.holdout),
        ("default settings", "", default),
        ("best fixed K", "", fixed_k),
    ):
        rows.append([label, train_speedup, str(prediction.speedup), f"{prediction.tau:.2f}", str(prediction.policy)])
    title = f"{policy}: {result.trials} trials on {len(tuning)} sequences, reported on {len(held)} others"
    print_table(title, ["", "tuning speedup", "hold-out speedup [95 % interval]", "tau", "policy"], rows)


@app.command()
def policies(json: JsonOption = False) -> None:
    """List the policies with their settings, defaults and ranges."""
    from specsim.policy import POLICIES

    if json:
        print_json(
            {
                name: {
                    "source": kind.source,
                    "settings": {
                        field.name: {"default": field.default, **field.metadata} for field in dataclasses.fields(kind)
                    },
                }
                for name, kind in POLICIES.items()
            }
        )
        return
    for name, kind in POLICIES.items():
        rows = []
        for field in dataclasses.fields(kind):
            meta = field.metadata
            tuned = f"{meta['tune'][0]:g} to {meta['tune'][1]:g}" if meta["tune"] else "held"
            rows.append([field.name, str(field.default), f"{meta['low']:g} to {meta['high']:g}", tuned, meta["doc"]])
        print_table(f"{name}: {kind.source}", ["setting", "default", "legal", "search", "meaning"], rows)


@app.command()
def info(trace: TraceArgument, json: JsonOption = False) -> None:
    """Show what a trace holds: the pair, decoding, sizes, agreement, repetition."""
    import numpy as np

    from specsim.trace import read_trace

    data = read_trace(trace)
    document = {
        **{key: value for key, value in data.meta.items() if key not in ("checksums", "provenance")},
        "sequences": data.sequences,
        "output_tokens": int(data.output_tokens.sum()),
        "domains": {str(d): int((data.domain == d).sum()) for d in np.unique(data.domain)},
        "mean_match_len": float(data.match_len.mean()),
    }
    if json:
        print_json(document)
        return
    print_table(f"trace {trace}", ["", "value"], [[key, str(value)] for key, value in document.items()])


@data.command("list")
def data_list(
    folder: Annotated[
        Path | None, typer.Option(help="A folder that `realrun campaign` wrote; default: what ships with specsim.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List campaign results: what each file holds, where and when it was measured. Reads and checks every file."""
    from specsim.results import SHIPPED, list_results

    results = list_results(folder or SHIPPED)
    columns = ("file", "kind", "device", "date", "summary")
    rows = [{name: getattr(result, name) for name in columns} for result in results]
    from_gpu = sum(result.from_gpu for result in results)
    if json:
        print_json({"results": rows, "from_gpu": from_gpu})
        return
    if rows:
        print_table("campaign results", list(columns), [list(row.values()) for row in rows])
    if not from_gpu:
        where = "there" if folder else "shipped"
        print(f"No result from a GPU is {where} yet; `realrun campaign --out DIR --minutes 30` on one makes them.")


def main() -> None:
    """Entry point of the console command."""
    run(app)
