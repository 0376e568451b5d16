"""The study's figures, from plain data to SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, estimates, spans, styled, svg
from specsim.speedup.intervals import Estimate
from studies.training.seeds import Seeds

COLORS, MARKERS = (PREDICTED, MEASURED, ADAPTIVE), "oDs"
Panel = tuple[str, Mapping[int, Mapping[str, Seeds]]]  # what is swept, and number -> policy -> replays


@styled()
def sweeps(panels: Sequence[Panel], value_of: Callable[[Seeds], Estimate], label: str, name: str, title: str) -> str:
    """A value against what is swept, a panel each and a line for each policy; 95 % intervals over seeds and prompts."""
    figure = Figure(figsize=(4.6 * len(panels), 3.3), layout="constrained")
    for axes, (what, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        policies = list(next(iter(rows.values())))
        for policy, color, marker in zip(policies, COLORS, MARKERS, strict=False):
            value, low, high = estimates([value_of(found[policy]).as_dict() for found in rows.values()])
            at = [number + 0.05 * policies.index(policy) for number in rows]
            axes.errorbar(at, value, yerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.2)
            axes.plot(at, value, f"{marker}-", color=color, markersize=5, label=policy, **DOT)
        axes.set_xticks(list(rows))
        axes.set_xlabel(what)
        axes.set_ylabel(label)
    axes.legend(loc="best")
    return svg(figure, name, title)


@styled()
def head_curves(curves: Mapping[str, Sequence[tuple[float, float]]], attainable: Estimate) -> str:
    """Agreement of MEDUSA's first head against the tokens seen, beside what is attainable.

    curves : form -> (millions of tokens, agreement)
    """
    figure = Figure(figsize=(6.4, 3.5), layout="constrained")
    axes = figure.subplots()
    for (name, points), color, marker in zip(curves.items(), COLORS, MARKERS, strict=False):
        tokens, agreement = zip(*points, strict=True)
        axes.plot(tokens, agreement, f"{marker}-", color=color, markersize=4, label=name, **DOT)
    axes.axhspan(attainable.low, attainable.high, color=MUTED, alpha=0.2, linewidth=0)
    axes.axhline(attainable.estimate, color=MUTED, linewidth=1, label="the target itself, next token unknown")
    axes.set_ylim(0, None)
    axes.set_xlabel("tokens seen, millions")
    axes.set_ylabel("agreement with the target")
    axes.legend(loc="best")
    return svg(figure, "heads", "MEDUSA's first head against the tokens seen")


@styled()
def heats(points: Mapping[str, Sequence[tuple[float, Estimate, Estimate]]]) -> str:
    """What a tuning costs, and what its first mask gains, against the learning rate.

    points : tuning -> (learning rate, cost in nats, gain of mask 1 in agreement)
    """
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = (
        ("cost, nats a token", [[cost for _, cost, _ in rows] for rows in points.values()]),
        ("mask 1 agrees more", [[gain for _, _, gain in rows] for rows in points.values()]),
    )
    for axes, (label, lines) in zip(panels, shown, strict=True):
        for place, (name, line) in enumerate(zip(points, lines, strict=True)):
            color, style = COLORS[place // 2], "o--" if place % 2 == 0 else "D-"
            value, low, high = estimates([one.as_dict() for one in line])
            rates = [rate for rate, _, _ in points[name]]
            axes.errorbar(rates, value, yerr=spans(value, low, high), fmt="none", ecolor=color, elinewidth=1.2)
            axes.plot(rates, value, style, color=color, markersize=5, label=name, **DOT)
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("learning rate")
        axes.set_ylabel(label)
    panels[0].legend(loc="best", fontsize=8, handlelength=3.6)
    return svg(figure, "heat", "Cost and gain of tuning against the learning rate")
