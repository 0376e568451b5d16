"""What reports in Markdown share: tables, intervals, and differences in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specsim.report.page import baseline_ms, choice_text, comparable_text, repeats_text
from specsim.speedup.intervals import LARGEST_FLOOR_PERCENT, Comparison, Estimate, interval_text

MEDIAN_PERCENT, MOST_PERCENT = 3.0, 5.0  # what predictions may be off by: the median, the 90th percentile


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table and an empty one."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows), ""]


def verdict(comparison: Comparison | None) -> str:
    """A difference of speedups and what it says."""
    if comparison is None:
        return "not on this board"
    return difference_text(comparison.difference)


def difference_text(d: Estimate) -> str:
    """A difference with its interval and what it says."""
    word = "better" if d.low > 0 else "worse" if d.high < 0 else "not significant"
    return f"{d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}] {word}"


def accuracy(error_percents: Iterable[float]) -> str:
    """How far predicted speedups were from measured ones, against the targets."""
    return f"Absolute error of all replays at the run's own costs: {errors_text(error_percents)}."


def errors_text(error_percents: Iterable[float]) -> str:
    """Median and 90th percentile of absolute errors, each against its target."""
    median, most = np.quantile(np.abs(list(error_percents)), [0.5, 0.9])

    def against(value: float, target: float) -> str:
        return f"{value:.2f} % (target {target:g} %: {'met' if value <= target else 'missed'})"

    return f"median {against(median, MEDIAN_PERCENT)}, 90th percentile {against(most, MOST_PERCENT)}"


def trust_table(documents: Mapping[str, Mapping[str, Any]], repeats: int) -> list[str]:
    """How far measurements can be trusted, a line each: machine, noise floor, errors, and the regret of the choice.

    documents : by name, results of `realrun validate` or `realrun leaderboard`
    repeats : timed runs of every prompt
    """
    columns = ["run", "load by others %", "baseline token, ms", "null arm", "noise floor %"]
    columns += [f"median error % (target {MEDIAN_PERCENT:g})", f"90th percentile % (target {MOST_PERCENT:g})"]
    choices = {name: text for name, document in documents.items() if (text := _choice_of(document))}
    rows = []
    for name, document in documents.items():
        floor, others = document["noise_floor_percent"], document["load"]["others_percent"]
        errors = np.quantile([abs(row["error_percent"]) for row in document["rows"]], [0.5, 0.9])
        against = [
            f"{value:.2f}, {'met' if value <= target else 'missed'}"
            for value, target in zip(errors, (MEDIAN_PERCENT, MOST_PERCENT), strict=True)
        ]
        noisy = ", too noisy to tell policies apart" if floor > LARGEST_FLOOR_PERCENT else ""
        busy = "n.a." if others is None else f"{others:.0f}"
        machine = [busy, f"{baseline_ms(document):.2f}", interval_text(document["null_arm"])]
        rows.append([name, *machine, f"{floor:.2f}{noisy}", *against])
    return [
        *markdown_table(columns, rows),
        *(line for text in comparable_text(documents) for line in (text, "")),
        *(line for name, text in choices.items() for line in (f"{name}: {text}", "")),
        f"Measured is the {repeats_text(repeats)}. The null arm is the baseline run a second time, its speedup over "
        "the first; the noise floor is how far from 1 its 95 % interval reaches, and smaller differences are not "
        "significant. Errors are absolute, of speedups replayed at the costs of the run's own rounds, of all policies "
        "that were really run.",
        "",
    ]


def _choice_of(document: Mapping[str, Any]) -> str:
    """What the forecast chose and what that cost; "" where a result holds none."""
    if document.get("choice"):
        return choice_text(document["choice"])
    if document.get("kind") != "specsim-drafter-leaderboard" or not document["rows"][0]["measured"]:
        return ""
    chosen = max(document["rows"], key=lambda row: float(row["train_speedup"]))  # boards of before it was kept
    behind = chosen["leader_minus_this"]
    choice = {
        "forecast": chosen["label"],
        "forecast_speedup": chosen["train_speedup"],
        "measured_speedup": chosen["measured"],
        "measured": document["rows"][0]["label"],
        **(
            {"regret": behind["difference"], "significant": behind.get("significant", behind.get("separated"))}
            if behind
            else {}
        ),
    }
    return choice_text(choice)


def ladder_table(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The same speedups predicted with ever fewer simplifications, and measured; rows of a validation by name."""
    rungs = ("eq14", "constant", "profile")
    table: list[list[str]] = []
    errors: dict[str, list[float]] = {rung: [] for rung in rungs}
    for name, row in rows:
        steps = row["ladder"]
        table.append([name, *("" if steps[rung] is None else f"{steps[rung]:.3f}" for rung in rungs)])
        table[-1].append(f"{steps['measured']:.3f}")
        for rung in rungs:
            if steps[rung] is not None:
                errors[rung].append(100 * abs(steps[rung] / steps["measured"] - 1))
    medians = [f"{np.median(found):.2f} %" if found else "" for found in errors.values()]
    return [
        *markdown_table(
            ["speedup of", "Eq. 14", "constant", "profile", "measured"], [*table, ["median error", *medians, ""]]
        ),
        "Eq. 14 (EESD) knows acceptance and s_d / s_t alone, of chains; constant, s_d a draft step and s_t a round; "
        "profile, what was measured by size and context.",
        "",
    ]
