"""What reports in Markdown share: tables, intervals, and differences in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specsim.bootstrap import Comparison


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table and an empty one."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows), ""]


def interval(value: Mapping[str, float]) -> str:
    """An estimate with its interval; keys estimate, low, high."""
    return f"{value['estimate']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def verdict(comparison: Comparison | None) -> str:
    """A difference of speedups and what it says."""
    if comparison is None:
        return "not on this board"
    d = comparison.difference
    word = "better" if d.low > 0 else "worse" if d.high < 0 else "not separated"
    return f"{d.estimate:+.3f} [{d.low:+.3f}, {d.high:+.3f}] {word}"
