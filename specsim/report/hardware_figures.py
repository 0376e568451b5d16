"""Figures of a comparison of hardware, each a function from plain data to inline SVG.

A device has the same color in every figure; in a tornado orange is less of a constant, blue more of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specsim.report import drawing

Row = Mapping[str, Any]
LESS, MORE = "#d55e00", "#0072b2"
PANELS_PER_LINE = 2
MOST_BARS = 8  # of a tornado; those below move less than any of them


def colors(rows: Sequence[Row]) -> dict[str, str]:
    """A color for every device."""
    devices = dict.fromkeys(row["gpu"] for row in rows)
    return {device: drawing.COLORS[number % len(drawing.COLORS)] for number, device in enumerate(devices)}


@drawing.styled()
def speedups(rows: Sequence[Row]) -> str:
    """Predicted speedup of every device with its interval, a mark per batch."""
    devices, batches = list(colors(rows)), sorted({row["batch"] for row in rows})
    figure, axes, lines = drawing.rows_figure(devices, 1.3 + 0.42 * len(devices) * max(1, 0.6 * len(batches)))
    axes.axvline(1, **drawing.DASHED)
    beside = np.linspace(0.25, -0.25, len(batches)) if len(batches) > 1 else [0.0]
    for number, (batch, off) in enumerate(zip(batches, beside, strict=True)):
        here = [row for row in rows if row["batch"] == batch]
        y = [lines[devices.index(row["gpu"])] + off for row in here]
        color, marker = drawing.COLORS[number % len(drawing.COLORS)], drawing.MARKERS[number % len(drawing.MARKERS)]
        texts = [f"{row['gpu']}, batch {batch}" for row in here]
        drawing.draw_intervals(
            axes, y, [row["speedup"] for row in here], color, texts, fmt=marker, label=f"batch {batch}"
        )
        for height, row in zip(y, here, strict=True):
            drawing.note_beside(axes, height, f"{row['speedup']['estimate']:.3f}", color)
    axes.margins(x=0.04)
    axes.set_xlabel(drawing.SPEEDUP_AXIS)
    if len(batches) > 1:
        figure.legend(loc="outside upper right", ncols=len(batches), handletextpad=0.3, columnspacing=1.4)
    return drawing.svg(figure, "hardware-speedup", "Predicted speedup of every device")


@drawing.styled()
def step_ratios(rows: Sequence[Row], contexts: Sequence[int]) -> str:
    """s_d / s_t over the context, a panel per batch, a line per device."""
    color, batches = colors(rows), sorted({row["batch"] for row in rows})
    figure, grid = _panels(len(batches), 3.4)
    for axes, batch in zip(grid, batches, strict=False):
        here = [row for row in rows if row["batch"] == batch]
        for row in here:
            axes.plot(contexts[: len(row["step_ratios"])], row["step_ratios"], color=color[row["gpu"]], linewidth=1.8)
        axes.set_ylim(0, 1.08 * max(max(row["step_ratios"]) for row in rows))
        drawing.margin_notes(axes, [(row["step_ratios"][-1], row["gpu"], color[row["gpu"]]) for row in here])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
        axes.set_xlabel("context, tokens")
        axes.set_title(f"batch {batch}")
    grid[0].set_ylabel("s_d / s_t")
    return drawing.svg(figure, "hardware-ratio", "s_d / s_t over the context")


@drawing.styled()
def tornadoes(rows: Sequence[Row], share: float) -> str:
    """Draw the speedup of every device and batch where a constant is smaller and larger, the widest on top."""
    bars = min(MOST_BARS, max(len(row["tornado"]) for row in rows))
    figure, grid = _panels(len(rows), 1.0 + 0.3 * bars)
    reach = max(abs(v - row["speedup"]["estimate"]) for row in rows for s in row["tornado"] for v in _ends(s))
    for axes, row in zip(grid, rows, strict=False):
        middle, swings = row["speedup"]["estimate"], row["tornado"][:MOST_BARS]
        y = np.arange(len(swings))[::-1]
        for key, color, text in (("less", LESS, "less"), ("more", MORE, "more")):
            widths = [swing[key] - middle for swing in swings]
            boxes = axes.barh(y, widths, 0.6, middle, color=color, label=f"{100 * share:.0f} % {text}")
            for box, swing in zip(boxes, swings, strict=True):
                drawing.add_tooltips(box, [f"{swing['constant']}, {100 * share:.0f} % {text}: {swing[key]:.3f}"])
        axes.axvline(middle, color=drawing.INK, linewidth=1)
        axes.set_yticks(y, [swing["constant"] for swing in swings], color=drawing.INK)
        axes.set_ylim(-0.6, bars - 0.4 - (bars - len(swings)))
        axes.set_xlim(middle - 1.08 * reach, middle + 1.08 * reach)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x")
        axes.spines["left"].set_visible(False)
        axes.set_title(f"{row['gpu']}, batch {row['batch']}: {middle:.3f}")
        axes.set_xlabel("speedup")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, handlelength=1.2, columnspacing=1.4)
    return drawing.svg(figure, "hardware-tornado", "Which constant moves the speedup")


def _ends(swing: Row) -> tuple[float, float]:
    return swing["less"], swing["more"]


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    lines = math.ceil(count / PANELS_PER_LINE)
    figure = Figure(figsize=(drawing.WIDE, height * lines + 0.3), layout="constrained")
    grid = list(figure.subplots(lines, min(count, PANELS_PER_LINE), squeeze=False).ravel())
    for axes in grid[count:]:
        axes.set_visible(False)
    return figure, grid
