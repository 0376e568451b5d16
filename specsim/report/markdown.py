"""What reports in Markdown share: tables, intervals, and differences in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

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
    return f"Absolute error of all predictions: {errors_text(error_percents)}."


def errors_text(error_percents: Iterable[float]) -> str:
    """Median and 90th percentile of absolute errors, each against its target."""
    median, most = np.quantile(np.abs(list(error_percents)), [0.5, 0.9])

    def against(value: float, target: float) -> str:
        return f"{value:.2f} % (target {target:g} %: {'met' if value <= target else 'missed'})"

    return f"median {against(median, MEDIAN_PERCENT)}, 90th percentile {against(most, MOST_PERCENT)}"


def trust_table(documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How far validations can be trusted, a line each: the noise floor, errors against both targets, and the regret.

    documents : by name, results of `realrun validate` or `realrun leaderboard`
    """
    columns = ["run", "null arm", "noise floor %", f"median error % (target {MEDIAN_PERCENT:g})"]
    columns += [f"90th percentile % (target {MOST_PERCENT:g})", "predicted best", "below the measured best by %"]
    rows = []
    for name, document in documents.items():
        floor, best = document["noise_floor_percent"], document["best"]
        errors = np.quantile([abs(row["error_percent"]) for row in document["rows"]], [0.5, 0.9])
        against = [
            f"{value:.2f}, {'met' if value <= target else 'missed'}"
            for value, target in zip(errors, (MEDIAN_PERCENT, MOST_PERCENT), strict=True)
        ]
        noisy = ", too noisy to tell policies apart" if floor > LARGEST_FLOOR_PERCENT else ""
        loss = f"{best['loss_percent']:.2f}, {'resolved' if best['resolved'] else 'not resolved'}"
        rows.append(
            [name, interval_text(document["null_arm"]), f"{floor:.2f}{noisy}", *against, best["predicted"], loss]
        )
    return [
        *markdown_table(columns, rows),
        "The null arm is the baseline run a second time, its speedup over the first; the noise floor is how far from 1 "
        "its 95 % interval reaches, and smaller differences are not resolved. Errors are absolute, of the predicted "
        "speedups of all policies that were really run.",
        "",
    ]


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
