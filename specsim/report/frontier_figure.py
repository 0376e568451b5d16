"""Figure of throughput against latency: a line per draft length or rule, a dot per load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from specsim.report.drawing import COLORS, DOT, INK, MARKERS, MUTED, styled


@styled()
def frontier_figure(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw tokens per second against the 90th percentile of ms per output token. points : of `FrontierPoint.as_dict`"""
    figure = Figure(figsize=(8.2, 4.6), layout="constrained")
    axes = figure.subplots()
    rules = 0
    for label in dict.fromkeys(point["summary"]["label"] for point in points):
        mine = [point for point in points if point["summary"]["label"] == label]
        x = [1e3 * point["summary"]["tpot_s"]["p90"] for point in mine]
        y = [point["summary"]["tokens_per_s"] for point in mine]
        if mine[0]["oracle"]:
            axes.plot(x, y, "--", color=INK, linewidth=1, label="oracle")
        elif mine[0]["k"] is not None:
            axes.plot(x, y, "-", color=MUTED, linewidth=0.8, alpha=0.6)
            axes.annotate(f"K={mine[0]['k']}", (x[-1], y[-1]), color=MUTED, fontsize=7.5)
        else:
            color, marker = COLORS[rules % len(COLORS)], MARKERS[rules % len(MARKERS)]
            axes.plot(x, y, f"-{marker}", color=color, markersize=5, label=label, **DOT)
            rules += 1
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("90th percentile of ms per output token")
    axes.set_ylabel("output tokens per second")
    figure.legend(loc="outside upper center", ncols=3)
    return figure
