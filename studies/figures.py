"""The two kinds of figures that studies draw: dots in a line per row, such as a policy, and lines over a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, INK, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg

DASHES = (0, (4, 3))
MARKERS = "oDs"
TALLEST = 9.0  # inches of rows
COLORS = (PREDICTED, MEASURED, ADAPTIVE, "#7a6fac", "#e69f00", "#56b4e9")
Line = tuple[Sequence[float], Sequence[Mapping[str, float]]]  # places, and estimates with their intervals


def point(value: float) -> dict[str, float]:
    """Return a value without an interval, as figures have it."""
    return {"estimate": value, "low": value, "high": value}


def speedup_dots(points: Sequence[tuple[str, Mapping[str, Any]]], name: str, title: str) -> str:
    """Draw predicted and measured speedup with intervals. points : a row for each of these labels"""
    rows = [(label, {key: row[key] for key in ("predicted", "measured")}) for label, row in points]
    return dots(rows, name, title, "speedup, baseline = 1; 95 % intervals", level=1)


@styled()
def dots(
    rows: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]], name: str, title: str, axis_label: str, level: float
) -> str:
    """Draw estimates with their intervals, a line for each row.

    rows : label, and the estimates by what they are of, the same in every row; level : where a dashed line is drawn
    """
    figure = Figure(figsize=(8.2, min(0.3 * len(rows), TALLEST) + 1.1), layout="constrained")
    axes = figure.subplots()
    y = -np.arange(len(rows), dtype=float)
    keys = list(rows[0][1])
    for place, (key, color, marker) in enumerate(zip(keys, COLORS, MARKERS, strict=False)):
        shift = 0.14 * (len(keys) - 1) - 0.28 * place
        value, low, high = estimates([row[key] for _, row in rows])
        axes.errorbar(value, y + shift, xerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.2)
        axes.plot(value, y + shift, marker, color=color, markersize=5, label=key, **DOT)
    axes.axvline(level, color=MUTED, linewidth=1, linestyle=DASHES)
    axes.set_yticks(y, [label for label, _ in rows])
    axes.tick_params(axis="y", colors=INK)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel(axis_label)
    figure.legend(loc="outside upper right", ncols=len(keys))
    return svg(figure, name, title)


@styled()
def line_panels(
    panels: Mapping[str, Mapping[str, Line]],
    axes_labels: tuple[str, str],
    name: str,
    *,
    level: float | None = None,
    log_x: bool = False,
    rows: int = 1,
) -> str:
    """Draw lines with intervals, a panel each.

    panels : by title, then by the line's label; level : where a dashed line is drawn; log_x : of a scale to base 2;
    rows : of panels
    """
    columns = len(panels) // rows
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    labels: dict[str, Any] = {}
    for axes, (title, lines) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels.items(), strict=True):
        for label, (x, values) in lines.items():
            color = COLORS[len(labels) % len(COLORS)] if label not in labels else labels[label][0].get_color()
            value, low, high = estimates(values)
            axes.errorbar(x, value, yerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.1, alpha=0.6)
            labels[label] = axes.plot(x, value, "o-", color=color, markersize=4.5, label=label, **DOT)
        if level is not None:
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=DASHES)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title)
        axes.set_xlabel(axes_labels[0])
        axes.set_ylabel(axes_labels[1])
    handles = [drawn[0] for drawn in labels.values()]
    figure.legend(handles, list(labels), loc="outside upper center", ncols=3)
    return svg(figure, name, f"{axes_labels[1]} against {axes_labels[0]}")
