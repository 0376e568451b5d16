"""Figures of draft trees: by size, by width and by domain, how sure their nodes are, and trees drawn.

Blue is dense, green the sparse tree, orange the size asked for. Of dynamic trees blue is PCT
and the first of several, orange what it is compared with.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import replacing
from specsim.policy.static_tree import shape as tree_shapes
from specsim.policy.static_tree.search import BestTrees, node_accept_probs
from specsim.policy.static_tree.shape import Shape
from specsim.report import drawing

FORMATS = (".png", ".svg")
LARGEST_DENSE = 256  # nodes
LABELLED = 80  # nodes of a level at which their ranks still fit into the dots


def check_figure(path: Path) -> None:
    """InputError unless this is a file name that a figure can be written to."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--figure {path}: the name ends neither in .png nor in .svg; choose .png or .svg")


@drawing.styled()
def write_search_figure(path: Path, trees: BestTrees, nodes: int) -> None:
    """Write the curve over sizes and the tree of `nodes` nodes below it, as PNG or SVG by the name."""
    check_figure(path)
    matplotlib.rcParams["svg.hashsalt"] = "tree"  # the same bytes every time
    shape = trees.shape(nodes)
    figure = Figure(figsize=(11.5, 9), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 1.15))
    draw_sizes(above, trees, nodes)
    draw_tree(below, shape, node_accept_probs(trees.rates, shape))
    below.set_title(f"The sparse tree of {nodes} nodes; numbers are ranks, shades the chance of acceptance")
    save_figure(figure, path)


def draw_sizes(axes: Axes, trees: BestTrees, nodes: int) -> None:
    """Expected tokens per round against nodes: dense trees and the sparse ones (MEDUSA, figure 6a)."""
    sizes = dense_sizes(trees.rates.shape)
    dots = np.array([dense_tokens(trees.rates, size) for size in sizes])
    equal = np.array([len(set(size)) == 1 for size in sizes])
    style: dict[str, Any] = {"linestyle": "none", "color": drawing.PREDICTED, **drawing.DOT}
    axes.plot(*dots[~equal].T, marker="o", markersize=4.5, alpha=0.7, label="dense: Cartesian product", **style)
    axes.plot(*dots[equal].T, marker="s", markersize=6, label="dense: as many children everywhere", **style)
    counts, tokens = np.arange(1, trees.nodes + 1), trees.expected_tokens[1:]
    axes.plot(counts, tokens, color=drawing.ADAPTIVE, linewidth=2, label="sparse: the likeliest nodes")
    axes.plot([nodes], [trees.expected_tokens[nodes]], "o", color=drawing.MEASURED, markersize=8, **drawing.DOT)
    axes.annotate(
        f"{nodes} nodes: {trees.expected_tokens[nodes]:.2f}",
        (nodes, float(trees.expected_tokens[nodes])),
        (-7, 7),
        textcoords="offset points",
        color=drawing.MEASURED,
        ha="right",
    )
    axes.margins(y=0.12)
    size_axis(axes, max(trees.nodes, int(dots[:, 0].max())))
    axes.set_title("Expected tokens per round")
    axes.legend(loc="lower right")


def draw_tree(axes: Axes, shape: Shape, chances: Floats) -> None:
    """A tree from the root down, a node's shade being its probability to be accepted [n + 1]."""
    x, y = layout(shape), -tree_shapes.depths(shape).astype(np.float64)
    parents = tree_shapes.parents(shape)
    lines = [[(x[parents[i]], y[parents[i]]), (x[i], y[i])] for i in range(1, len(shape))]
    axes.add_collection(LineCollection(lines, colors="#c9ced6", linewidths=1, zorder=1))
    shades = LinearSegmentedColormap.from_list("chance", ["#f3f8fc", "#9cc9e8", drawing.PREDICTED, "#00345a"])
    axes.scatter(x, y, s=130, c=np.sqrt(chances), cmap=shades, vmin=0, vmax=1, edgecolors=drawing.RULE, zorder=2)
    oracle_width = np.bincount(tree_shapes.depths(shape)).max()
    if oracle_width <= LABELLED:
        ranks = tree_shapes.ranks(shape)
        for i in range(1, len(shape)):
            color = "white" if chances[i] > 0.25 else drawing.INK
            axes.annotate(str(ranks[i]), (x[i], y[i]), ha="center", va="center", fontsize=7, color=color, zorder=3)
    levels = int(-y.min())
    axes.set_yticks(-np.arange(levels + 1), [str(depth) for depth in range(levels + 1)])
    axes.set_ylabel("depth, tokens")
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_ylim(-levels - 0.5, 0.5)
    axes.tick_params(axis="y", colors=drawing.MUTED)


def size_axis(axes: Axes, largest: int) -> None:
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
    dense: list[tuple[int, ...]] = [(size,) for size in range(1, ranks + 1)]
    for sizes in dense:  # grows as it goes
        if len(sizes) < depth:
            longer = ((*sizes, size) for size in range(1, sizes[-1] + 1))
            dense += [tree for tree in longer if np.cumprod(tree).sum() <= LARGEST_DENSE]
    return dense


def dense_tokens(rates: Floats, sizes: tuple[int, ...]) -> tuple[int, float]:
    """Nodes and expected tokens per round of a Cartesian tree."""
    within = [rates[depth, :size].sum() for depth, size in enumerate(sizes)]
    return int(np.cumprod(sizes).sum()), 1 + float(np.cumprod(within).sum())


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG by the name, whole or not at all."""
    kind = path.suffix[1:].lower()
    with replacing(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
