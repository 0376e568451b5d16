"""The figures that studies draw: dots in a line per row, such as a policy, lines over a setting, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specsim.replaying.intervals import Estimate
from specsim.report.drawing import ADAPTIVE, DOT, INK, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg

DASHES = (0, (4, 3))
MARKERS = "oDs"
TALLEST = 9.0  # inches of rows
COLORS = (PREDICTED, MEASURED, ADAPTIVE, "#7a6fac", "#e69f00", "#56b4e9")
Line = tuple[Sequence[float], Sequence[Mapping[str, float] | Estimate]]  # places, and estimates with their intervals
Dots = Sequence[
    tuple[str, Mapping[str, Mapping[str, float] | Estimate]]
]  # rows: label, and estimates by what they are of


def point(value: float) -> dict[str, float]:
    """Return a value without an interval, as figures have it."""
    return {"estimate": value, "low": value, "high": value}


@styled()
def dots(rows: Dots, name: str, title: str, axis_label: str, level: float) -> str:
    """Draw estimates with their intervals, a line for each row.

    rows : have estimates of the same; level : where a dashed line is drawn
    """
    figure = Figure(figsize=(8.2, min(0.3 * len(rows), TALLEST) + 1.1), layout="constrained")
    axes = figure.subplots()
    _draw_dots(axes, rows, axis_label, level)
    figure.legend(loc="outside upper right", ncols=len(rows[0][1]))
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
    labels: dict[str, list[Line2D]] = {}
    for axes, (title, lines) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels.items(), strict=True):
        _draw_lines(axes, lines, labels)
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


@styled()
def lines_over_dots(
    title: str,
    lines: Mapping[str, Line],
    axes_labels: tuple[str, str],
    panels: Mapping[str, Dots],
    axis_label: str,
    name: str,
    *,
    level: float,
) -> str:
    """Draw lines, and under them panels of dots with estimates of the same, which share their axis.

    title : of the lines; panels : by title; axis_label : of theirs; level : where a dashed line is drawn in them
    """
    tallest = 0.3 * max(map(len, panels.values())) + 0.9
    figure = Figure(figsize=(8.2, 3.4 + tallest), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[3.4, tallest])
    axes = above.subplots()
    _draw_lines(axes, lines, {})
    axes.set(title=title, xlabel=axes_labels[0], ylabel=axes_labels[1])
    if lines:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axes, (panel, rows) in zip(below.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        _draw_dots(axes, rows, axis_label, level)
        axes.set_title(panel)
    below.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(MARKERS))
    return svg(figure, name, f"{axes_labels[1]}; {axis_label}")


def _draw_dots(axes: Axes, rows: Dots, axis_label: str, level: float) -> None:
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


def _draw_lines(axes: Axes, lines: Mapping[str, Line], labels: dict[str, list[Line2D]]) -> None:
    """Draw lines; beyond the colors with another marker. labels : what is drawn by label, of all panels so far"""
    for label, (x, values) in lines.items():
        turn, at = divmod(len(labels), len(COLORS))
        color, marker = COLORS[at], MARKERS[turn % len(MARKERS)]
        if label in labels:
            color, marker = labels[label][0].get_color(), labels[label][0].get_marker()
        value, low, high = estimates(values)
        axes.errorbar(x, value, yerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.1, alpha=0.6)
        labels[label] = axes.plot(x, value, marker=marker, color=color, markersize=4.5, label=label, **DOT)
