"""`specsim cost fit`: step times of an engine, fitted to recorded steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.cli.options import SeedSettings
from specsim.io.settings import argument


@dataclass(frozen=True, kw_only=True)
class FitOptions(SeedSettings):
    """Which steps are fitted."""

    steps: Path = argument(
        "Recorded steps: CSV with the columns sequences,tokens,cached_tokens,seconds, or a batch profile (.json).",
        metavar="STEPS",
    )


def fit(options: FitOptions) -> Answer:
    """Fit step times of an engine.

    A step is a pass of the target over some new tokens and sequences, with some cached tokens. Three forms are fitted:
    linear; f(tokens) + k x cached tokens; fixed + a(batch) + b(tokens). Each is fitted to half of the distinct steps
    and judged by the others; the printed numbers are fitted to all. With --json, each is a `target` for cost files of
    the form linear.

    Example: specsim cost fit steps.csv
    """
    from specsim.cost.step_times import judge_step_times
    from specsim.learn.recorded_steps import read_steps

    recorded = read_steps(options.steps)
    forms = judge_step_times(recorded, seed=options.seed)
    steps = len(recorded.seconds)
    rows = [
        [
            form.form,
            f"{100 * form.median_error:.2f}",
            f"{100 * form.p90_error:.2f}",
            f"{1e3 * form.rmse_s:.3f}",
            _in_words(form.fitted.as_dict()),
        ]
        for form in forms
    ]
    columns = ["form", "median error %", "90th percentile", "RMSE, ms", "fitted to all, ms"]
    title = f"step times; errors on {forms[0].held_out:,} held-out steps of {steps:,}"
    show = partial(print_table, title, columns, rows, labels=5)
    return Answer({"steps": steps, "forms": [form.as_dict() for form in forms]}, show)


def _in_words(fitted: dict[str, Any]) -> str:
    """A form's numbers, in milliseconds."""
    parts = []
    for name, value in fitted.items():
        if isinstance(value, dict):
            points = zip(value["at"], value["seconds"], strict=True)
            parts.append(f"{name} " + ", ".join(f"{at:g}: {1e3 * seconds:.3g}" for at, seconds in points))
        else:
            parts.append(f"{name.removesuffix('_s').replace('_', ' ')} {1e3 * value:.4g}")
    return "; ".join(parts)
