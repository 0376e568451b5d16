"""The study's figures, from plain data to SVG. Blue is predicted, orange measured, as in every report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, INK, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg

Document = Mapping[str, Any]
DASHES = (0, (4, 3))


@styled()
def speedups(points: Sequence[Mapping[str, Any]], name: str) -> str:
    """Predicted and measured speedup of every drafter's contenders, a row each."""
    figure = Figure(figsize=(8.2, 0.27 * len(points) + 1.1), layout="constrained")
    axes = figure.subplots()
    y = -np.arange(len(points), dtype=float)
    for key, color, marker, shift in (("predicted", PREDICTED, "o", 0.14), ("measured", MEASURED, "D", -0.14)):
        value, low, high = estimates([point[key] for point in points])
        axes.errorbar(value, y + shift, xerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.2)
        axes.plot(value, y + shift, marker, color=color, markersize=5, label=key, **DOT)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=DASHES)
    axes.set_yticks(y, [f"{point['drafter']}, {point['policy']}" for point in points])
    axes.tick_params(axis="y", colors=INK)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("speedup, autoregressive = 1; 95 % intervals")
    figure.legend(loc="outside upper right", ncols=2)
    return svg(figure, f"speedups-{name}", "Predicted and measured speedups of drafters")


@styled()
def against_k(documents: Mapping[str, Document], contenders: Mapping[str, Mapping[str, float]], name: str) -> str:
    """Predicted speedup against K for each drafter, its Thompson sampling as a dashed line (EESD, figure 3).

    contenders : drafter -> predicted speedups by the name of their policy
    """
    figure = Figure(figsize=(2.9 * len(documents), 3.1), layout="constrained")
    panels = figure.subplots(1, len(documents), squeeze=False, sharey=True)[0]
    for axes, (drafter, document) in zip(panels, documents.items(), strict=True):
        curve = document["k_curve"]
        value, low, high = estimates(curve["predicted"])
        axes.fill_between(curve["k"], low, high, color=PREDICTED, alpha=0.15, linewidth=0)
        axes.plot(curve["k"], value, "o-", color=PREDICTED, markersize=4, label="fixed K", **DOT)
        for label, color, line in (("Beta-TS", ADAPTIVE, "-"), ("Cali-TS", MEASURED, DASHES)):
            if label in contenders[drafter]:
                axes.axhline(contenders[drafter][label], color=color, linestyle=line, linewidth=1.4, label=label)
        axes.set_title(drafter)
        axes.set_xlabel("K, tokens")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("predicted speedup")
    panels[0].legend(loc="best", fontsize=8)
    return svg(figure, f"k-{name}", "Predicted speedup against the draft length")


@styled()
def typical(arms: Sequence[Mapping[str, Any]]) -> str:
    """Acceleration rate against the target's log-likelihood of the output, over epsilon (MEDUSA, figure 7).

    arms : rows of `realrun.validation.typical_acceptance.compare_typical`
    """
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.subplots()

    def places(arm: str) -> tuple[list[float], list[float]]:
        mine = [row for row in arms if row["arm"] == arm]
        x, y = ([row[key]["estimate"] for row in mine] for key in ("acceleration_rate", "log_likelihood_nats"))
        return x, y

    x, y = places("typical")
    axes.plot(x, y, "o-", color=PREDICTED, markersize=5, label="typical acceptance", **DOT)
    thresholds = [row["epsilon"] for row in arms if row["arm"] == "typical"]
    for place in (0, -1):  # those between crowd together
        at, words = (x[place], y[place]), f"epsilon {thresholds[place]:g}"
        axes.annotate(words, at, (0, -12), textcoords="offset points", fontsize=8, color=MUTED, ha="center")
    for arm, color, marker in (("sampling", MEASURED, "D"), ("greedy", ADAPTIVE, "s")):
        axes.plot(*places(arm), marker, color=color, markersize=7, linestyle="none", label=f"{arm}, loss-free", **DOT)
    axes.set_xlabel("acceleration rate, tokens per target pass")
    axes.set_ylabel("log-likelihood under the target, nats per token")
    axes.legend(loc="best")
    return svg(figure, "typical", "Likelihood and speed of typical acceptance")
