"""The study's figures: trees by size, by width and by domain, how sure their nodes are, and trees drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specsim.report.drawing import (
    ADAPTIVE,
    DOT,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    margin_notes,
    note_above,
    styled,
    svg,
)
from specsim.report.tree_figures import DASHES, draw_tree, size_axis
from specsim.static_tree import shape as tree_shapes

BOX = ("whislo", "q1", "med", "q3", "whishi")  # percentiles 5, 25, 50, 75, 95, as matplotlib names them
SERIES = (PREDICTED, MEASURED, ADAPTIVE, "#7a6fac")
Points = Sequence[Mapping[str, Any]]


@styled()
def sizes(dense: Points, sparse: Points, costs: Sequence[str], name: str) -> str:
    """Tokens per round, and speedup at each of these costs, against a static tree's nodes (MEDUSA, figure 6).

    dense, sparse : {"nodes", "tokens", "speedups": by cost, None where the costs do not cover the tree}; sparse by size
    """
    figure = Figure(figsize=(4.1 * (1 + len(costs)), 3.9), layout="constrained")
    panels = figure.subplots(1, 1 + len(costs), squeeze=False)[0]
    largest = max(point["nodes"] for point in (*dense, *sparse))
    for axes, cost in zip(panels, (None, *costs), strict=True):
        for points, label, style in (
            (dense, "dense", {"marker": "o", "markersize": 4.5, "linestyle": "none", "color": PREDICTED, "alpha": 0.7}),
            (sparse, "sparse, searched", {"marker": "*", "markersize": 9, "linewidth": 1.5, "color": ADAPTIVE}),
        ):
            height = [point["tokens"] if cost is None else point["speedups"][cost] for point in points]
            seen = [(p["nodes"], value) for p, value in zip(points, height, strict=True) if value is not None]
            if seen:
                axes.plot(*zip(*seen, strict=True), label=label, **{**DOT, **style})
        if cost is not None:
            axes.axhline(1, color=MUTED, linewidth=1, linestyle=DASHES)
        size_axis(axes, largest)
        axes.set_title("acceptance length" if cost is None else f"speedup, {cost}")
        axes.set_ylabel("tokens per round" if cost is None else "ratio, autoregressive = 1")
    panels[0].legend(loc="lower right")
    return svg(figure, f"{name}-sizes", "Acceptance length and speedup against the size of a static tree")


@styled()
def widths(rows: Points, reference: Mapping[str, Any], name: str) -> str:
    """Acceptance length and verified nodes of PCT against its expansion width (EDD + PCT, figure 6).

    rows : {"width", "nodes", "tau"}, by width; reference : {"label", "nodes", "tau"}, of a policy drawn as a line
    """
    figure = Figure(figsize=(10.4, 3.8), layout="constrained")
    at = [row["width"] for row in rows]
    for axes, key, title, unit in (
        (figure.add_subplot(1, 2, 1), "tau", "acceptance length", "tokens per round"),
        (figure.add_subplot(1, 2, 2), "nodes", "nodes verified", "nodes per round, mean"),
    ):
        axes.plot(at, [row[key] for row in rows], "o-", color=PREDICTED, linewidth=2, markersize=6, **DOT)
        axes.axhline(reference[key], color=MEASURED, linewidth=1.5, linestyle=DASHES)
        axes.set_ylim(0, 1.12 * max(reference[key], *(row[key] for row in rows)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("children of an expanded node")
        axes.set_ylabel(unit)
        axes.set_title(title)
        margin_notes(axes, [(rows[-1][key], "PCT", PREDICTED), (reference[key], reference["label"], MEASURED)])
    return svg(figure, f"{name}-widths", "Acceptance length and verified nodes against expansion width")


@styled()
def domains(policies: Mapping[str, Mapping[str, Mapping[str, Any]]], name: str) -> str:
    """Acceptance length, and how the verified nodes of rounds spread, by domain (EDD + PCT, figure 7).

    policies : by name, then by domain: {"tau", "nodes_percentiles"}; the same domains for all
    """
    found = list(next(iter(policies.values())))
    figure = Figure(figsize=(10.4, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = 0.8 / len(policies)
    for number, (policy, by_domain) in enumerate(policies.items()):
        color = SERIES[number % len(SERIES)]
        places = np.arange(len(found)) + (number - (len(policies) - 1) / 2) * width
        tau = [by_domain[domain]["tau"] for domain in found]
        left.bar(places, tau, 0.9 * width, color=color, label=policy)
        for x, value in zip(places, tau, strict=True):
            note_above(left, f"{value:.2f}", float(x), value)
        boxes = right.bxp(
            [dict(zip(BOX, by_domain[domain]["nodes_percentiles"], strict=True)) for domain in found],
            positions=places,
            widths=0.7 * width,
            showfliers=False,
            patch_artist=True,
            medianprops={"color": INK, "linewidth": 1.5},
        )
        for box in boxes["boxes"]:
            box.set(facecolor=color, alpha=0.55, edgecolor=INK)
    for axes, title, unit in (
        (left, "acceptance length", "tokens per round"),
        (right, "nodes verified", "nodes of a round: 5, 25, 50, 75, 95 %"),
    ):
        axes.set_xticks(np.arange(len(found)), found, color=INK)
        axes.set_xlim(-0.6, len(found) - 0.4)
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.set_ylabel(unit)
    figure.legend(loc="outside upper right", ncols=len(policies), handlelength=1, handleheight=1)
    return svg(figure, f"{name}-domains", "Acceptance length and verified nodes by domain")


@styled()
def reliability(series: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Chance of nodes against how often they are right, given that their parent is (EDD + PCT, figure 3b).

    series : by name, bins of a `Reliability` as plain data: count, mean_confidence, accept_rate, ece
    """
    figure = Figure(figsize=(5.4, 5.0), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=DASHES)
    for (label, bins), color, marker in zip(series.items(), SERIES, "osD^", strict=False):
        seen = np.asarray(bins["count"]) > 0
        x, y = (np.asarray(bins[key], dtype=np.float64)[seen] for key in ("mean_confidence", "accept_rate"))
        text = f"{label}: ECE {bins['ece']:.3f}, {sum(bins['count']):,} nodes"
        axes.plot(x, y, f"{marker}-", color=color, linewidth=1.5, markersize=6, label=text, **DOT)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_aspect("equal")
    axes.set_xlabel("probability of a node given its parent")
    axes.set_ylabel("share right, where the parent is")
    axes.legend(loc="upper left", fontsize=8.5)
    return svg(figure, f"{name}-reliability", "Probability of nodes against acceptance")


@styled()
def trees(chosen: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Trees one below the other. chosen : by title, {"shape", "chances": of acceptance, of every node [n + 1]}"""
    deepest = [int(tree_shapes.depths(tree["shape"]).max()) for tree in chosen.values()]
    heights = [1.2 + 0.42 * depth for depth in deepest]
    figure = Figure(figsize=(11.5, sum(heights)), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, tree) in zip(panels, chosen.items(), strict=True):
        draw_tree(axes, tree["shape"], np.asarray(tree["chances"]))
        axes.set_title(title)
    return svg(figure, f"{name}-trees", "Static trees")
