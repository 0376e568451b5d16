"""`realrun engine check`: an engine's rounds beside a replay's."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from realrun.cli.engine.pair import TraceOption, pair_and_trace
from realrun.cli.options import (
    DraftModelOption,
    JsonOption,
    MaxNewTokensOption,
    NumPromptsOption,
    PromptsOption,
    TargetOption,
    refuse_beside,
)
from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar

EngineOption = Annotated[str, typer.Option(help="Engine to run: llamacpp, vllm or transformers.", show_default=False)]


def check(
    ctx: typer.Context,
    engine: EngineOption,
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    k: Annotated[str, typer.Option(help="Draft lengths K, each a run of its own.")] = "1,2,3,5,8",
    p_min: Annotated[
        str,
        typer.Option(
            help="llama.cpp's p-min, each with the longest K: a draft ends before a token less sure than this."
        ),
    ] = "",
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Draft by the engine's prompt lookup, not with the draft model.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Sequences at once, at most; of vLLM.", min=1)] = 1,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="vLLM's K from so many sequences of a step on, in place of --k, such as 1:5,3:3,4:0.",
            show_default=False,
        ),
    ] = None,
    trace: TraceOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    json: JsonOption = False,
) -> None:
    """Run an engine greedily on the CPU, in float32, and compare every round and counter with a trace's replay.

    The pair is converted for the engine, which runs in a process of its own. Where a probability lies so near p_min, or
    two tokens so near each other, that float32 may turn them around, the replay is told what the engine did, and the
    near tie is named. Exits with 1 where rounds differ beyond these. In batches, a simulated server must draft as the
    engine does in every round, too. vLLM runs in an environment of its own, which `nox -s vllm` makes in this folder;
    SPECSIM_VLLM_PYTHON names the interpreter of another.

    Example: realrun engine check --engine llamacpp --target MODEL --draft-model SMALL_MODEL --k 1,3,5 --p-min 0.5
    """
    from realrun.engines.check import check as run_check
    from realrun.engines.check import scheduled, settings_of
    from realrun.engines.registry import find_engine
    from specsim.errors import InputError
    from specsim.serving.draft_length import as_schedule

    if schedule is not None:
        refuse_beside(ctx, "schedule", ("k", "p_min"))
    found = find_engine(engine)
    if lookup and found.lookup_rule is None:
        raise InputError(f"{engine}'s prompt lookup follows a rule that no replay knows; leave --lookup out")
    thresholds = parse_numbers(p_min, "--p-min", float, "0.3,0.5") if p_min else []
    if schedule is None:
        settings = settings_of(found, parse_numbers(k, "--k", int, "1,3,5"), thresholds, batch)
    else:
        settings = [scheduled(found, as_schedule(schedule).lengths, batch)]
    with progress_bar() as report:
        pair, recorded = pair_and_trace(
            ctx,
            found,
            target,
            draft_model,
            trace=trace,
            prompts=prompts,
            num_prompts=num_prompts,
            depth=max(setting.k for setting in settings),
            max_new_tokens=max_new_tokens,
            progress=report,
        )
        document = run_check(pair, recorded, found, settings, max_new_tokens, lookup=lookup, progress=report)
    if json:
        print_json(document)
    else:
        _print_check(document)
    if not document["identical"]:
        raise typer.Exit(1)


COLUMNS = ["setting", "sequences identical", "rounds identical", "drafted", "accepted", "counters", "near ties"]
COUNTERS = {None: "none", True: "equal", False: "differ"}


def _print_check(document: dict[str, Any]) -> None:
    rows = [
        [
            row["setting"],
            f"{row['sequences_identical']} of {row['sequences']}",
            f"{row['rounds_identical']:,} of {row['rounds']:,}",
            f"{row['drafted']:,}",
            f"{row['accepted']:,}",
            COUNTERS[row["counters_equal"]],
            str(len(row["near_ties"])),
        ]
        for row in document["settings"]
    ]
    who = f"{document['engine']} {document['version']}, {document['target']} with {document['drafter']}"
    if rule := document["lookup_rule"]:
        who += f" of {rule['min_ngram']} to {rule['max_ngram']} tokens"
    size = f"{document['prompts']['count']} prompts, up to {document['max_new_tokens']} tokens"
    print_table(f"{who}: {size}", COLUMNS, rows)
    for row in document["settings"]:
        for tie in row["near_ties"]:
            print(f"near tie, {row['setting']}: {tie['text']}")
        for difference in row["differences"]:
            print(f"differs, {row['setting']}: {difference}")
        if not row["rounds"]:
            print(f"not compared, {row['setting']}: no round had a draft; give another schedule, or other prompts")
    print(
        "every round is the replay's, near ties named"
        if document["identical"]
        else "not every setting was compared, or rounds or counters differ from the replay's"
    )
