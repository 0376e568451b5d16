"""What reports in Markdown share: tables, intervals, and differences in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specsim.speedup.intervals import Comparison

MEDIAN_PERCENT, MOST_PERCENT = 3.0, 5.0  # what predictions may be off by: the median, the 90th percentile


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table and an empty one."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows), ""]


def verdict(comparison: Comparison | None) -> str:
    """A difference of speedups and what it says."""
    if comparison is None:
        return "not on this board"
    d = comparison.difference
    word = "better" if d.low > 0 else "worse" if d.high < 0 else "not separated"
    return f"{d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}] {word}"


def accuracy(error_percents: Iterable[float]) -> str:
    """How far predicted speedups were from measured ones, against the targets."""
    median, most = np.quantile(np.abs(list(error_percents)), [0.5, 0.9])

    def against(value: float, target: float) -> str:
        return f"{value:.2f} % (target {target:g} %: {'met' if value <= target else 'missed'})"

    return (
        f"Absolute error of all predictions: median {against(median, MEDIAN_PERCENT)}, 90th percentile "
        f"{against(most, MOST_PERCENT)}."
    )
