"""`realrun engine validate`: an engine's tokens per second, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import typer

from realrun.cli.engine.pair import EnginePrompts
from realrun.cli.options import REPEATS_HELP, ModelSettings
from specsim.cli.command import Answer
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.settings import setting


@dataclass(frozen=True, kw_only=True)
class EngineValidateOptions(EnginePrompts, SeedSettings):
    """Which engine runs, in which settings."""

    engine: str = setting("llamacpp", "Engine to run: llamacpp.")
    profile_k: tuple[int, ...] = setting((1, 2, 4, 8), "Draft lengths K to measure costs from.")
    k: tuple[int, ...] | None = setting((3, 5, 6, 7), "Draft lengths K to predict.")
    p_min: tuple[float, ...] | None = setting((0.3, 0.5, 0.75, 0.9), "p-min values to predict, each at the largest K.")
    repeats: int = setting(3, REPEATS_HELP)


def validate(ctx: typer.Context, options: EngineValidateOptions, models: ModelSettings) -> Answer:
    """Predict and measure an engine's speed.

    Predicts tokens per second in settings that were not profiled, and measures them. Settings take turns, prompt by
    prompt, in one process. Costs come from the seconds that the engine itself reports without speculation and for the
    draft lengths of --profile-k; acceptance comes from a trace. A second run without speculation (A/A test) gives the
    noise floor.

    Example: realrun engine validate --target lab-deep --num-prompts 12
    """
    from realrun.engines.registry import find_engine
    from realrun.engines.validate import plan_of
    from realrun.engines.validate import validate as run_validation
    from realrun.experiment.timing import check_repeats

    check_repeats(options.repeats)
    engine = find_engine(options.engine)
    plan = plan_of(list(options.profile_k), list(options.k or ()), list(options.p_min or ()))
    depth = max(setting.k for setting in plan.arms)
    with progress_bar() as report:
        pair, trace = options.pair_and_trace(ctx, models, engine, depth, report)
        document = run_validation(
            pair,
            trace,
            engine,
            plan,
            options.max_new_tokens,
            repeats=options.repeats,
            seed=options.seed,
            progress=report,
        )
    return Answer(document, partial(_print_validation, document))


COLUMNS = ["setting", "predicted tokens/s", "measured tokens/s", "error %", "measured speedup [95 % interval]", ""]


def _print_validation(document: dict[str, Any]) -> None:
    from specsim.replaying.intervals import interval_text
    from specsim.report.page import choice_text, floor_text, load_text, speculation_text

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
    title = f"{document['engine']} {document['version']}, {document['target']} with {document['drafter']}"
    print_table(f"{title}: {document['prompts']['count']} prompts, {document['repeats']} repeats", COLUMNS, rows)
    print(
        f"absolute error of settings that were not profiled: median {document['median_abs_error_percent']:.2f} %, "
        f"largest {document['max_abs_error_percent']:.2f} %"
    )
    print(choice_text(document["choice"]))
    fastest = max(document["rows"][1:], key=lambda row: row["measured_tokens_per_second"])
    print(speculation_text(fastest["setting"], fastest["measured_speedup"], document["noise_floor_percent"]))
