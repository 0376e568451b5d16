"""The study's figures, from plain data to SVG. Blue is predicted, orange measured, as in every report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specsim.report.drawing import DOT, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg
from specsim.report.leaderboard_figures import LINES, MARKERS
from specsim.serving.speedup_map import SpeedupMap
from studies.batches.real import Case
from studies.batches.servers import best_fixed

BREAK_EVEN = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 3))}


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch")
    axes.axhline(1, **BREAK_EVEN)


@styled()
def server_speedups(maps: Mapping[str, Mapping[int, SpeedupMap]], batches: Sequence[int], name: str) -> str:
    """Of every server, the speedup of the best fixed K by batch, a line for each context."""
    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).ravel()
    for axes, (server, by_context) in zip(panels, maps.items(), strict=True):
        for (context, found), (color, style), marker in zip(by_context.items(), LINES, MARKERS, strict=False):
            value, low, high = estimates(cell.speedup[best_fixed(found, cell)].as_dict() for cell in found.cells)
            at = [cell.batch for cell in found.cells]
            axes.fill_between(at, low, high, color=color, alpha=0.13, linewidth=0)
            label = f"context {context}"
            axes.plot(at, value, marker, color=color, linestyle=style, markersize=5, label=label, **DOT)
        axes.set_title(server)
        _batch_axis(axes, batches)
        axes.set_ylabel("speedup of the best K")
        axes.label_outer()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return svg(figure, name, "Speedup of the best fixed K by batch and context, 95 % intervals")


@styled()
def real_speedups(cases: Sequence[Case], name: str) -> str:
    """Predicted and measured speedup by batch, a panel for each K."""
    lengths = sorted({case.k for case in cases if case.k > 0})
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(lengths), sharey=True))
    for axes, k in zip(panels, lengths, strict=True):
        mine = [case for case in cases if case.k == k]
        batches = np.array([case.batch for case in mine])
        for key, color, marker, shift in (("predicted", PREDICTED, "o", 0.95), ("measured", MEASURED, "D", 1.05)):
            value, low, high = estimates(getattr(case, key).as_dict() for case in mine)
            bars = spans(value, low, high)
            axes.errorbar(batches * shift, value, yerr=bars, fmt="none", ecolor=color, elinewidth=1.2)
            axes.plot(batches * shift, value, marker, color=color, linestyle="-", linewidth=1, label=key, **DOT)
        axes.set_title(f"K={k}")
        _batch_axis(axes, batches.tolist())
    panels[0].set_ylabel("speedup")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return svg(figure, name, "Speedup of the lab decoded in batches, predicted and measured, 95 % intervals")
