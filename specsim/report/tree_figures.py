"""Figures of draft trees: by size, by width and by domain, how sure their nodes are, and trees drawn.

Blue is dense, green the sparse tree, orange the size asked for. Of dynamic trees blue is PCT
and the first of several, orange what it is compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specsim.arrays import Floats
from specsim.errors import InputError
from specsim.files import replacing
from specsim.report.drawing import (
    ADAPTIVE,
    DOT,
    INK,
    MEASURED,
    MUTED,
    PREDICTED,
    RULE,
    margin_notes,
    note_above,
    styled,
    svg,
)
from specsim.static_tree import shape as tree_shapes
from specsim.static_tree.search import BestTrees, node_chances
from specsim.static_tree.shape import Shape

FORMATS = (".png", ".svg")
LARGEST_DENSE = 256  # nodes
WHISKERS = (5, 95)  # percentiles
DASHES = (0, (4, 3))
SERIES = (PREDICTED, MEASURED, ADAPTIVE, "#7a6fac")
LABELLED = 80  # nodes of a level at which their ranks still fit into the dots

Points = Sequence[Mapping[str, Any]]


def check_figure(path: Path) -> None:
    """InputError unless this is a file name that a figure can be written to."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--figure {path}: the name ends neither in .png nor in .svg; give one of these")


@styled()
def write_search_figure(path: Path, found: BestTrees, nodes: int) -> None:
    """Write the curve over sizes and the tree of `nodes` nodes below it, as PNG or SVG by the name."""
    check_figure(path)
    matplotlib.rcParams["svg.hashsalt"] = "tree"  # the same bytes every time
    shape = found.shape(nodes)
    figure = Figure(figsize=(11.5, 9), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.15))
    draw_sizes(above, found, nodes)
    draw_tree(below, shape, node_chances(found.rates, shape))
    below.set_title(f"The sparse tree of {nodes} nodes; numbers are ranks, shades the chance of acceptance")
    _save(figure, path)


def draw_sizes(axes: Axes, found: BestTrees, nodes: int) -> None:
    """Expected tokens per round against nodes: dense trees and the sparse ones (MEDUSA, figure 6a)."""
    sizes = dense_sizes(found.rates.shape)
    dots = np.array([dense_tokens(found.rates, size) for size in sizes])
    equal = np.array([len(set(size)) == 1 for size in sizes])
    style: dict[str, Any] = {"linestyle": "none", "color": PREDICTED, **DOT}
    axes.plot(*dots[~equal].T, marker="o", markersize=4.5, alpha=0.7, label="dense: Cartesian product", **style)
    axes.plot(*dots[equal].T, marker="s", markersize=6, label="dense: as many children everywhere", **style)
    counts, tokens = np.arange(1, found.nodes + 1), found.expected_tokens[1:]
    axes.plot(counts, tokens, color=ADAPTIVE, linewidth=2, label="sparse: the likeliest nodes")
    axes.plot([nodes], [found.expected_tokens[nodes]], "o", color=MEASURED, markersize=8, **DOT)
    axes.annotate(
        f"{nodes} nodes: {found.expected_tokens[nodes]:.2f}",
        (nodes, float(found.expected_tokens[nodes])),
        (-7, 7),
        textcoords="offset points",
        color=MEASURED,
        ha="right",
    )
    axes.margins(y=0.12)
    _size_axis(axes, max(found.nodes, int(dots[:, 0].max())))
    axes.set_title("Expected tokens per round")
    axes.legend(loc="lower right")


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
        _size_axis(axes, largest)
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

    policies : by name, then by domain: {"tau", "nodes": of every round [R]}; the same domains for all
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
        boxes = right.boxplot(
            [by_domain[domain]["nodes"] for domain in found],
            positions=places,
            widths=0.7 * width,
            whis=WHISKERS,
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
def trees(chosen: Mapping[str, tuple[Shape, Floats]], name: str) -> str:
    """Trees one below the other. chosen : by title, shape and every node's chance of acceptance [n + 1]"""
    deepest = [int(tree_shapes.depths(shape).max()) for shape, _ in chosen.values()]
    heights = [1.2 + 0.42 * depth for depth in deepest]
    figure = Figure(figsize=(11.5, sum(heights)), layout="constrained")
    panels = figure.subplots(len(chosen), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, (shape, chances)) in zip(panels, chosen.items(), strict=True):
        draw_tree(axes, shape, chances)
        axes.set_title(title)
    return svg(figure, f"{name}-trees", "Static trees")


def draw_tree(axes: Axes, shape: Shape, chances: Floats) -> None:
    """A tree from the root down, a node's shade being its chance to be accepted [n + 1]."""
    x, y = layout(shape), -tree_shapes.depths(shape).astype(np.float64)
    parents = tree_shapes.parents(shape)
    lines = [[(x[parents[i]], y[parents[i]]), (x[i], y[i])] for i in range(1, len(shape))]
    axes.add_collection(LineCollection(lines, colors="#c9ced6", linewidths=1, zorder=1))
    shades = LinearSegmentedColormap.from_list("chance", ["#f3f8fc", "#9cc9e8", PREDICTED, "#00345a"])
    axes.scatter(x, y, s=130, c=np.sqrt(chances), cmap=shades, vmin=0, vmax=1, edgecolors=RULE, zorder=2)
    oracle_width = np.bincount(tree_shapes.depths(shape)).max()
    if oracle_width <= LABELLED:
        ranks = tree_shapes.ranks(shape)
        for i in range(1, len(shape)):
            color = "white" if chances[i] > 0.25 else INK
            axes.annotate(str(ranks[i]), (x[i], y[i]), ha="center", va="center", fontsize=7, color=color, zorder=3)
    deepest = int(-y.min())
    axes.set_yticks(-np.arange(deepest + 1), [str(depth) for depth in range(deepest + 1)])
    axes.set_ylabel("depth, tokens")
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_ylim(-deepest - 0.5, 0.5)
    axes.tick_params(axis="y", colors=MUTED)


def _size_axis(axes: Axes, largest: int) -> None:
    """A horizontal axis of nodes, in powers of 2."""
    axes.set_xscale("log", base=2)
    ticks = [2**k for k in range(largest.bit_length() + 1) if 2**k <= 1.5 * largest]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("nodes of the tree, root not counted")


def layout(shape: Shape) -> Floats:
    """Place of every node from left to right [n + 1]: leaves 1 apart in order, a parent amid its children."""
    children = [np.flatnonzero(tree_shapes.parents(shape) == node).tolist() for node in range(len(shape))]
    x = np.zeros(len(shape))
    leaves = itertools.count()

    def place(node: int) -> None:
        for child in children[node]:
            place(child)
        below = children[node]
        x[node] = (x[below[0]] + x[below[-1]]) / 2 if below else next(leaves)

    place(0)
    return x


def dense_sizes(rates_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Cartesian trees of at most LARGEST_DENSE nodes that do not widen with depth: their children per depth."""
    depth, ranks = rates_shape
    found: list[tuple[int, ...]] = [(size,) for size in range(1, ranks + 1)]
    for sizes in found:  # grows as it goes
        if len(sizes) < depth:
            longer = ((*sizes, size) for size in range(1, sizes[-1] + 1))
            found += [one for one in longer if np.cumprod(one).sum() <= LARGEST_DENSE]
    return found


def dense_tokens(rates: Floats, sizes: tuple[int, ...]) -> tuple[int, float]:
    """Nodes and expected tokens per round of a Cartesian tree."""
    within = [rates[depth, :size].sum() for depth, size in enumerate(sizes)]
    return int(np.cumprod(sizes).sum()), 1 + float(np.cumprod(within).sum())


def _save(figure: Figure, path: Path) -> None:
    """Write the file whole or not at all."""
    kind = path.suffix[1:].lower()
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
