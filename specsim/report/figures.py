"""Figures of results that have no module of figures of their own, each a function from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specsim.io.arrays import Floats, IntArray
from specsim.replaying.rounds import PARTS
from specsim.report import drawing

PART_COLORS = (drawing.PREDICTED, drawing.INK, "#9cc9e8", "#c9ced6")  # of PARTS
LONGEST_LABEL = 60  # characters


@drawing.styled()
def lines_of_estimates(labels: Sequence[str], values: Sequence[Mapping[str, float]], name: str, what: str) -> str:
    """`estimates_figure` as SVG."""
    return drawing.svg(estimates_figure(labels, values, what), name, what)


@drawing.styled()
def estimates_figure(labels: Sequence[str], values: Sequence[Mapping[str, float]], what: str) -> Figure:
    """A line per label with its estimate and interval; the first is drawn in green."""
    short = [shorten(label, LONGEST_LABEL, placeholder=" ...") for label in labels]
    figure, axes, y = drawing.rows_figure(short, 1.1 + 0.34 * len(labels))
    axes.axvline(1, **drawing.DASHED)
    for row, (label, value) in enumerate(zip(labels, values, strict=True)):
        drawing.draw_intervals(axes, y[row], [value], drawing.PREDICTED if row else drawing.ADAPTIVE, [label])
    axes.margins(x=0.04)
    axes.set_xlabel(what)
    return figure


@drawing.styled()
def run_figure(accepted: IntArray | None, token_s: Floats, baseline_s: float) -> Figure:
    """A run: how many tokens rounds accept, where they are known, and what a token's time goes to.

    accepted : [R]; token_s : seconds per output token by part; baseline_s : of autoregressive decoding
    """
    figure = Figure(figsize=(drawing.WIDE, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    if accepted is not None:
        counts = np.bincount(accepted)
        left.bar(np.arange(len(counts)), 100 * counts / counts.sum(), 0.8, color=drawing.PREDICTED)
    left.set_title("Accepted tokens per round")
    left.set_xlabel("accepted draft tokens")
    left.set_ylabel("share of rounds (%)")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.grid(visible=False, axis="y")
    right.grid(visible=True, axis="x")
    at = 0.0
    for name, seconds, color in zip(PARTS, 1e3 * token_s, PART_COLORS, strict=True):
        right.barh(1, seconds, 0.5, at, color=color, label=name)
        at += float(seconds)
    right.barh(0, 1e3 * baseline_s, 0.5, color="#9cc9e8")
    right.set_yticks([1, 0], ["with the policy", "autoregressive"], color=drawing.INK)
    right.set_title("Time per output token")
    right.set_xlabel("milliseconds")
    right.spines["left"].set_visible(False)
    right.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=4, handlelength=1.2)
    return figure


@drawing.styled()
def by_length(lengths: Sequence[int], speedups: Sequence[Mapping[str, float]]) -> str:
    """Speedup over the draft length, with intervals; the best in green."""
    figure = Figure(figsize=(drawing.WIDE, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, **drawing.DASHED)
    mid, low, high = drawing.estimates(speedups)
    axes.plot(lengths, mid, color=drawing.PREDICTED, linewidth=1.4)
    for k, value, *ends in zip(lengths, mid, low, high, strict=True):
        color = drawing.ADAPTIVE if value == mid.max() else drawing.PREDICTED
        marks = axes.errorbar(
            [k], [value], yerr=drawing.spans(value, *ends)[:, None], fmt="o", color=color, elinewidth=1.6, **drawing.DOT
        )
        drawing.add_tooltips(marks[0], [drawing.interval_tooltip(f"K = {k}", value, *ends)])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft tokens K")
    axes.set_ylabel("speedup (ratio, without speculation = 1)")
    return drawing.svg(figure, "advice-lengths", "Speedup over the draft length")


@drawing.styled()
def by_batch(batches: Sequence[int], lines: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> str:
    """Speedup over the batch, a line with its intervals for each label."""
    figure = Figure(figsize=(drawing.WIDE, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, **drawing.DASHED)
    notes = [(1.0, "no speculation", drawing.MUTED)]
    for number, (label, values) in enumerate(lines.items()):
        color, marker = drawing.COLORS[number % len(drawing.COLORS)], drawing.MARKERS[number % len(drawing.MARKERS)]
        mid, low, high = drawing.estimates(values)
        axes.fill_between(batches, low, high, color=color, alpha=0.08, linewidth=0)
        axes.plot(batches, mid, color=color, linewidth=1.4)
        (marks,) = axes.plot(batches, mid, marker, color=color, markersize=6, **drawing.DOT)
        texts = map(drawing.interval_tooltip, [f"{label}, batch {batch}" for batch in batches], mid, low, high)
        drawing.add_tooltips(marks, texts)
        notes.append((float(mid[-1]), label, color))
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("sequences in a batch")
    axes.set_ylabel("speedup (ratio, without speculation = 1)")
    drawing.margin_notes(axes, notes)
    return drawing.svg(figure, name, "Speedup over the batch")
