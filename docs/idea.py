"""The picture of the idea, of recorded data: `python -m docs.idea` writes docs/figures/idea.svg.

One trace of SmolLM2 with EAGLE, three policies replayed over it, the costs that were measured, and what a real run of
the same policies took; all as the study of policies recorded it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import specsim
from docs.pages import HOME, ROOT
from docs.tables import best_forms
from specsim.report.drawing import ADAPTIVE, DOT, INK, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg

RECORDED = ROOT / "studies" / "policies" / "recorded" / "greedy"
FIGURE = HOME / "figures" / "idea.svg"
SEQUENCE, SHOWN = 3, 30  # whose first tokens are drawn
POLICIES = (("fixed_k", {"k": 4}), ("adaedl", {"gamma": 0.2, "lambda0": 0.4}), ("max_confidence", {"lambda0": 0.4}))


def rounds_of(policy: str, settings: dict[str, float]) -> list[tuple[int, int, int]]:
    """(position, drafted, accepted) of every round of the sequence that begins within what is drawn."""
    trace = specsim.read_trace(RECORDED / "trace")
    run: Any = specsim.replay(trace, specsim.ConstantCost(0.001, 0.01), policy, **settings)
    frame = run.rounds.to_frame()
    frame = frame[(frame["sequence"] == SEQUENCE) & (frame["t"] < SHOWN)]
    return list(zip(frame["t"], frame["drafted"], frame["accepted"], strict=True))


def draw_trace(axes: Axes, match_len: Any) -> None:
    """At every position, how many drafted tokens agree with the target; below, each policy's rounds."""
    axes.bar(np.arange(SHOWN), match_len[:SHOWN], color=MUTED, width=0.7)
    axes.set_title("1  One trace: drafted tokens that the target agrees with, from every position")
    axes.set_ylabel("tokens")
    axes.set_xticks([])


def draw_rounds(axes: Axes) -> None:
    labels = []
    for row, (policy, settings) in enumerate(POLICIES):
        values = ", ".join(f"{name}={value}" for name, value in settings.items())
        labels.append(f"{policy}({values})")
        for position, drafted, accepted in rounds_of(policy, settings):
            for i in range(drafted):
                x, color = position + i, ADAPTIVE if i < accepted else "white"
                if x < SHOWN:
                    axes.plot(x, -row, "s", color=color, markersize=6.5, markeredgecolor=ADAPTIVE, markeredgewidth=0.9)
            if position + accepted < SHOWN:
                axes.plot(position + accepted, -row + 0.34, "v", color=MEASURED, markersize=4)
    axes.set_yticks(-np.arange(len(POLICIES), dtype=float), labels)
    axes.tick_params(axis="y", colors=INK)
    axes.set_ylim(0.6 - len(POLICIES), 0.7)
    axes.set_xlim(-0.8, SHOWN - 0.2)
    axes.grid(visible=False)
    axes.set_title("2  Many policies: accepted (full), rejected (empty), the target's own (triangles)")
    axes.set_xlabel("position in the target's output, in tokens")


def draw_costs(axes: Axes) -> None:
    cost = json.loads((RECORDED / "profile.json").read_text())["median_s"]["verify"]
    verify_ms = 1000 * np.mean(np.array(cost, dtype=float), axis=1)  # [tokens - 1], mean over contexts
    axes.plot(np.arange(1, len(verify_ms) + 1), verify_ms, "o-", color=PREDICTED, markersize=4, **DOT)
    axes.set_ylim(0)
    axes.set_title("3  One cost table")
    axes.set_xlabel("tokens verified in one pass")
    axes.set_ylabel("ms, measured")


def draw_speedups(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    predicted, low, high = estimates([row["predicted"] for row in rows])
    measured, *_ = estimates([row["measured"] for row in rows])
    y = -np.arange(len(rows), dtype=float)
    axes.errorbar(predicted, y, xerr=spans(predicted, low, high), fmt="none", ecolor=PREDICTED, elinewidth=1, alpha=0.4)
    axes.plot(predicted, y, "o", color=PREDICTED, markersize=5.5, label="predicted", **DOT)
    axes.plot(measured, y, "D", color=MEASURED, markersize=4, label="measured", **DOT)
    axes.set_yticks(y, [row["policy"] for row in rows])
    axes.tick_params(axis="y", colors=INK)
    axes.set_xlabel("speedup, 95 % intervals")
    axes.set_title("4  Predicted beside measured")
    axes.legend(loc="lower right", fontsize=8)


@styled()
def idea() -> str:
    """The picture as an <svg>."""
    trace = specsim.read_trace(RECORDED / "trace")
    rows = json.loads((RECORDED / "replayed.json").read_text())["rows"]
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 1.9), width_ratios=(1, 1.4))
    begin, end = trace.offsets[SEQUENCE : SEQUENCE + 2]
    draw_trace(figure.add_subplot(grid[0, :]), trace.match_len[begin:end])
    draw_rounds(figure.add_subplot(grid[1, :]))
    draw_costs(figure.add_subplot(grid[2, 0]))
    draw_speedups(figure.add_subplot(grid[2, 1]), best_forms(rows, "policy"))
    for axes in figure.axes[:2]:
        axes.set_xlim(-0.8, SHOWN - 0.2)
    text = svg(figure, "idea", "One trace, many policies, one cost table, predicted beside measured")
    return text.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) if "xmlns=" not in text else text


if __name__ == "__main__":
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(idea())
