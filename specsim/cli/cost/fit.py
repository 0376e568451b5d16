"""`specsim cost fit`: what a step takes, fitted to recorded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import JsonOption, SeedOption


def fit(
    steps: Annotated[
        Path,
        typer.Argument(
            help="Recorded steps: a CSV file with the columns sequences,tokens,cached_tokens,seconds, or a batch "
            "profile (.json).",
            metavar="STEPS",
            show_default=False,
        ),
    ],
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Fit what a step of an engine takes: linear, f(tokens) + k x cached tokens, or fixed + a(batch) + b(tokens).

    A step is a pass of the target: over so many new tokens of so many sequences, behind so
    many cached tokens of all. Each form is fitted to half of the distinct steps and judged by
    the others; what is printed of it is fitted to all. With --json, each is a `target` as cost
    files of the form linear take it.

    Example: specsim cost fit steps.csv
    """
    from specsim.cost.step_times import judge_step_times
    from specsim.fitting.recorded_steps import read_steps

    recorded = read_steps(steps)
    judged = judge_step_times(recorded, seed=seed)
    if json:
        print_json({"steps": len(recorded.seconds), "forms": [one.as_dict() for one in judged]})
        return
    rows = [
        [
            one.form,
            f"{100 * one.median_error:.2f}",
            f"{100 * one.p90_error:.2f}",
            f"{1e3 * one.rmse_s:.3f}",
            _words(one.fitted.as_dict()),
        ]
        for one in judged
    ]
    held_out = f"errors on {judged[0].held_out:,} of {len(recorded.seconds):,} steps, not fitted to"
    columns = ["form", "median error %", "90th percentile", "RMSE, ms", "fitted to all, ms"]
    print_table(f"What a step takes; {held_out}", columns, rows, labels=5)


def _words(fitted: dict[str, Any]) -> str:
    """A form's numbers, in milliseconds."""
    told = []
    for name, value in fitted.items():
        if isinstance(value, dict):
            points = zip(value["at"], value["seconds"], strict=True)
            told.append(f"{name} " + ", ".join(f"{at:g}: {1e3 * seconds:.3g}" for at, seconds in points))
        else:
            told.append(f"{name.removesuffix('_s').replace('_', ' ')} {1e3 * value:.4g}")
    return "; ".join(told)
