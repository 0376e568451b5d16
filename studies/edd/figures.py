"""The study's figures, from plain data to SVG. Blue is predicted, orange measured, as in every report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specsim.report.drawing import DOT, INK, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg

Row = Mapping[str, Any]
DASHES = (0, (4, 3))


@styled()
def speedups(points: Sequence[tuple[str, Row]], name: str, title: str) -> str:
    """Predicted and measured speedup, a row for each of these names."""
    figure = Figure(figsize=(8.2, 0.3 * len(points) + 1.1), layout="constrained")
    axes = figure.subplots()
    y = -np.arange(len(points), dtype=float)
    for key, color, marker, shift in (("predicted", PREDICTED, "o", 0.14), ("measured", MEASURED, "D", -0.14)):
        value, low, high = estimates([row[key] for _, row in points])
        axes.errorbar(value, y + shift, xerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.2)
        axes.plot(value, y + shift, marker, color=color, markersize=5, label=key, **DOT)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=DASHES)
    axes.set_yticks(y, [label for label, _ in points])
    axes.tick_params(axis="y", colors=INK)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("speedup, autoregressive = 1; 95 % intervals")
    figure.legend(loc="outside upper right", ncols=2)
    return svg(figure, name, title)
