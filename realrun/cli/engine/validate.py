"""`realrun engine validate`: an engine's tokens per second, predicted and measured."""

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
    RepeatsOption,
    SeedOption,
    TargetOption,
)
from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar


def validate(
    ctx: typer.Context,
    engine: Annotated[str, typer.Option(help="Engine to run: llamacpp.")] = "llamacpp",
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    profile_k: Annotated[str, typer.Option(help="Draft lengths K whose rounds tell the costs.")] = "1,2,4,8",
    k: Annotated[str, typer.Option(help="Draft lengths K to predict.")] = "3,5,6,7",
    p_min: Annotated[str, typer.Option(help="p-min to predict, each with the longest K of all.")] = "0.3,0.5,0.75,0.9",
    trace: TraceOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Predict an engine's tokens per second in settings that it was not profiled in, and measure them.

    Settings take turns, prompt by prompt, in one process. What rounds cost is read off the seconds that the engine
    itself reports without speculation and for the draft lengths of --profile-k; what is accepted, off a trace. A second
    run without speculation shows how far two like settings lie apart, the noise floor.

    Example: realrun engine validate --target lab-deep --num-prompts 12
    """
    from realrun.engines.registry import find_engine
    from realrun.engines.validate import plan_of
    from realrun.engines.validate import validate as run_validation
    from realrun.validation.timing import check_repeats

    check_repeats(repeats)
    found = find_engine(engine)
    plan = plan_of(
        parse_numbers(profile_k, "--profile-k", int, "1,2,4,8"),
        parse_numbers(k, "--k", int, "3,5") if k else [],
        parse_numbers(p_min, "--p-min", float, "0.3,0.5") if p_min else [],
    )
    depth = max(setting.k for setting in plan.arms)
    with progress_bar() as report:
        pair, recorded = pair_and_trace(
            ctx,
            found,
            target,
            draft_model,
            trace=trace,
            prompts=prompts,
            num_prompts=num_prompts,
            depth=depth,
            max_new_tokens=max_new_tokens,
            progress=report,
        )
        document = run_validation(
            pair, recorded, found, plan, max_new_tokens, repeats=repeats, seed=seed, progress=report
        )
    if json:
        print_json(document)
    else:
        _print_validation(document)


COLUMNS = ["setting", "predicted tokens/s", "measured tokens/s", "error %", "measured speedup [95 % interval]", ""]


def _print_validation(document: dict[str, Any]) -> None:
    from specsim.report.page import choice_text, floor_text, load_text, speculation_text
    from specsim.speedup.intervals import interval_text

    print(f"machine: {load_text(document['load'])}")
    print(floor_text(document))
    rows = [
        [
            row["setting"],
            f"{row['predicted_tokens_per_second']:.1f}",
            f"{row['measured_tokens_per_second']:.1f}",
            f"{row['error_percent']:+.1f}",
            interval_text(row["measured_speedup"]),
            "profiled" if row["profiled"] else "",
        ]
        for row in document["rows"]
    ]
    who = f"{document['engine']} {document['version']}, {document['target']} with {document['drafter']}"
    print_table(f"{who}: {document['prompts']['count']} prompts, {document['repeats']} repeats", COLUMNS, rows)
    print(
        f"absolute error of what was not profiled: median {document['median_abs_error_percent']:.2f} %, "
        f"largest {document['max_abs_error_percent']:.2f} %"
    )
    print(choice_text(document["choice"]))
    top = max(document["rows"][1:], key=lambda row: row["measured_tokens_per_second"])
    print(speculation_text(top["setting"], top["measured_speedup"], document["noise_floor_percent"]))
