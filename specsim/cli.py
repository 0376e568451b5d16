"""The `specsim` command: replay and tune on a recorded trace. Needs no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.commands.acceptance import acceptance
from specsim.commands.leaderboard import leaderboard
from specsim.commands.options import (
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
from specsim.commands.tree import tree
from specsim.commands.tune import tune
from specsim.console import parse_settings, print_json, print_table, run

if TYPE_CHECKING:
    pass

app = typer.Typer(
    help="Simulate speculative decoding: replay a recorded trace under any policy, tune it, rank them all.\n\n"
    "Traces come from `realrun record`, costs from `realrun profile`.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data = typer.Typer(help="Results of campaigns that ship with specsim, or lie in a folder.", no_args_is_help=True)
app.add_typer(data, name="data")
app.add_typer(acceptance, name="acceptance")
app.add_typer(tree, name="tree")


@app.command()
def replay(
    trace: TraceArgument,
    policy: PolicyOption,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, nobody changes it)
    tuning_share: Annotated[
        float, typer.Option(help="Share of the sequences that a policy which learns from data learns from.")
    ] = 0.5,
    expected: Annotated[
        bool,
        typer.Option(help="The exact expectation over what the policy draws (Thompson sampling), not one replay."),
    ] = False,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Replay a trace under one policy and predict its speedup.

    A policy that learns from data or costs what --set does not give (renewal_stop,
    time_gain) learns on one part of the sequences and is reported on the other. Regret is
    the time beyond that of the oracle, which knows what will be accepted.

    Example: specsim replay TRACE --policy adaedl --set gamma=0.2 --cost profile.json
    """
    from specsim.policy import build_policy
    from specsim.policy.files import find_policy
    from specsim.prediction import least_seconds, predict, summarise
    from specsim.replay import compile_for
    from specsim.trace_files import read_trace
    from specsim.tuning.space import shortened
    from specsim.tuning.variants import learns

    whole, model = read_trace(trace), read_costs(cost, draft_cost, batch)
    settings: dict[str, Any] = {**parse_settings(set_)}
    kind = find_policy(policy)
    settings = {**shortened(kind, whole.depth), **settings}
    chosen = build_policy(kind, settings)
    part, learned_on = whole, 0
    if learns(type(chosen)):
        from specsim.tuning import split_sequences

        tuning, held = split_sequences(whole, tuning_share=tuning_share, seed=seed)
        train = whole.select(tuning)
        learned = type(chosen).fit(settings, train, compile_for(train, model))
        if learned != chosen:  # not all was given
            chosen, part, learned_on = learned, whole.select(held), len(tuning)
    if expected:
        from specsim.averaged import expected_replay
        from specsim.errors import InputError
        from specsim.policy import ChainPolicy

        if not isinstance(chosen, ChainPolicy):
            raise InputError(f"policy {chosen.name} is of trees, which --expected does not average; replay it")

        table = compile_for(part, model)
        result = expected_replay(part, chosen, compile_for(part, model, chosen))
        prediction = summarise(result, least_seconds(part, [type(chosen)], table, seed=seed))
    else:
        prediction = predict(part, chosen, model, seed=seed)
    document = prediction.as_dict()
    if json:
        sizes = {"learned_on": learned_on, "sequences": part.sequences, "approximate": whole.approximate}
        print_json({**document, **sizes})
        return
    rows = [["speedup [95 % interval]", str(prediction.speedup)]]
    for key in ("v_d", "r_d", "hm", "tau", "seconds", "ar_seconds"):
        rows.append([key, f"{document[key]:.3f}"])
    trees = ["verified", "truncated_rounds"] if prediction.truncated_rounds is not None else []
    for key in ("rounds", "drafted", *trees, "accepted", "output_tokens"):
        rows.append([key, f"{document[key]:,}"])
    rows.append(["oracle regret", percent_text(prediction.oracle_regret)])
    notes = [f"learned on {learned_on} sequences, reported on {part.sequences} others"] if learned_on else []
    if expected:
        notes.append("expected")
    if whole.approximate:
        notes.append("approximate: rejection sampling")
    print_table("; ".join([str(chosen), *notes]), ["quantity", "value"], rows)


app.command()(tune)
app.command()(leaderboard)


def percent_text(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


@app.command()
def policies(
    also: Annotated[
        list[str], typer.Option(help="Policies of your own beside those, FILE.py or FILE.py:NAME.", metavar="FILE.py")
    ] = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """List the policies with their settings, defaults and ranges.

    --policy and --also of other commands take these names, and a FILE.py of your own.
    """
    from specsim.policy import POLICIES, find_policies

    kinds = find_policies([*POLICIES, *also])
    if json:
        print_json(
            {
                name: {
                    "source": kind.source,
                    "settings": {
                        field.name: {"default": field.default, **field.metadata} for field in dataclasses.fields(kind)
                    },
                }
                for name, kind in kinds.items()
            }
        )
        return
    for name, kind in kinds.items():
        rows = [setting_texts(field) for field in dataclasses.fields(kind)]
        print_table(f"{name}: {kind.source}", ["setting", "default", "legal", "search", "meaning"], rows)


def setting_texts(field: dataclasses.Field[Any]) -> list[str]:
    """A setting's line in `policies`: name, default, legal values, search range, meaning."""
    meta, default = field.metadata, field.default
    low, high = f"{meta['low']:g}", f"{meta['high']:g}"
    shown, legal = str(default), f"{low} to {high}"
    searched = f"{meta['tune'][0]:g} to {meta['tune'][1]:g}{', log' if meta['log'] else ''}" if meta["tune"] else "held"
    if isinstance(default, (bool, str)):
        choices = meta["choices"] or ("true", "false")
        shown, legal, searched = str(default).lower(), ", ".join(choices), "all" if meta["tune"] else "held"
    elif isinstance(default, tuple):
        shown = ",".join(f"{number:g}" for number in default) if len(default) <= 4 else f"{len(default)} numbers"
        legal, searched = f"numbers, {low} to {high}", "learned" if not meta["tune"] else searched
    return [field.name, shown, legal, searched, meta["doc"]]


@app.command()
def info(trace: TraceArgument, json: JsonOption = False) -> None:
    """Show what a trace holds: the pair, decoding, sizes, agreement, repetition."""
    import numpy as np

    from specsim.trace_files import read_trace

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
