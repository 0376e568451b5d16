"""What studies compare: rows of policies from real runs, the best of several, and differences with significance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specsim.replaying.intervals import Comparison, Estimate, beyond_floor, paired_difference

Row = Mapping[str, Any]


def first_best(rows: Iterable[Row]) -> Row | None:
    """Return the row that is best on the tuning prompts, to report it on others; None without rows."""
    return max(rows, key=lambda row: float(row["train_speedup"]), default=None)


def best_by(rows: Sequence[Row], key: str) -> dict[str, Row]:
    """Return the best row on the tuning prompts for each value of a key."""
    best = {name: first_best(row for row in rows if row[key] == name) for name in dict.fromkeys(r[key] for r in rows)}
    return {name: row for name, row in best.items() if row is not None}


def table_rows(run: str, rows: Sequence[Row], **names: str) -> list[Row]:
    """Return what table.csv has of really decoded policies. names : of the drafter or the costs, by column"""
    return [
        {
            "run": run,
            **names,
            "policy": row["policy"],
            "form": row["role"],
            "settings": row["label"],
            "predicted": row["predicted"],
            "measured": row["measured"],
            "error_percent": row["error_percent"],
            "rounds_identical_percent": row["rounds_identical_percent"],
            "rounds_truncated_percent": 100 * row["truncated_share"],
            "tau": row["tau"],
            "acceptance_rate": row["v_d"],
            "tuning_speedup": row["train_speedup"],
            "predicted_eq14": row["ladder"]["eq14"],
        }
        for row in rows
    ]


def board_rows(run: str, board: Row, **names: str) -> list[Row]:
    """Return what table.csv has of policies that were replayed only."""
    return [
        {
            "run": run,
            **names,
            "policy": row["policy"],
            "settings": row["label"],
            "predicted": row["speedup"],
            "rounds_truncated_percent": 100 * row["truncated_share"],
            "tau": row["tau"],
            "acceptance_rate": row["v_d"],
            "tuning_speedup": row["train_speedup"],
        }
        for row in board["rows"]
    ]


def form(row: Row) -> str:
    """Return a policy's name and form without its settings."""
    return str(row["policy"]) if row["role"] == row["policy"] else f"{row['policy']}, {row['role']}"


def measured_difference(document: Row, a: Row, b: Row) -> Comparison:
    """Return the measured speedup of row a of a validation less that of row b."""
    return paired_difference(document["autoregressive_sequence_seconds"], a["sequence_seconds"], b["sequence_seconds"])


def differ_measured(document: Row, a: Row, b: Row) -> bool:
    """Return whether two measured rows differ significantly (95 %) and by more than the noise floor."""
    both = (row["measured"]["estimate"] for row in (a, b))
    return measured_difference(document, a, b).significant and beyond_floor(document["noise_floor_percent"], *both)


def measured_gap(document: Row, a: Row, b: Row, name: str) -> str:
    """Return by how much row a measures above or below row b. name : of row b in the sentence"""
    difference = measured_difference(document, a, b).difference
    low, value, high = difference.low, difference.estimate, difference.high
    side = "above"
    if value < 0:
        side, low, value, high = "below", -high, -value, -low
    note = "" if differ_measured(document, a, b) else ", not significant"
    return f"{value:.3f} [{low:.3f}, {high:.3f}] {side} {name}{note}"


def sign_text(value: Estimate | Row) -> str:
    """Return whether a gain lies significantly above or below 0."""
    low, high = (value.low, value.high) if isinstance(value, Estimate) else (value["low"], value["high"])
    return "faster" if low > 0 else "slower" if high < 0 else "not significant"


def difference_text(difference: Estimate, *, significant: bool | None = None) -> str:
    """Return a difference with its interval and whether it is significant: whether that excludes 0 unless given."""
    if significant is None:
        significant = difference.low > 0 or difference.high < 0
    interval = f"{difference.estimate:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
    return interval if significant else f"{interval}, not significant"
