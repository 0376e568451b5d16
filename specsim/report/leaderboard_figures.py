"""Figures of a leaderboard report, each a function from plain data to inline SVG.

Green is the leader and the rows whose difference to it is not significant, blue is the rest, orange the
oracle, in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specsim.report.drawing import DOT, INK, MUTED, RULE, estimates, interval_told, spans, styled, svg, told

Row = Mapping[str, Any]

LEADING, BEHIND, ORACLE = "#007a5a", "#0072b2", "#d55e00"
PARTS = (  # key, legend, color
    ("draft", "drafting", "#0072b2"),
    ("policy", "deciding", "#1f2328"),
    ("verify", "verification", "#9cc9e8"),
    ("other", "rest of the round", "#c9ced6"),
)
LINES = (("#0072b2", "-"), ("#d55e00", (0, (5, 1.5))), ("#007a5a", (0, (1, 1.2))), ("#7a6fac", "-."))
MARKERS = "osD^vPX*"
WIDE = 12.4  # inches
PANELS_PER_LINE = 4
MOST_CELLS = 21  # of a line, before numbers of tokens share cells


@styled()
def ranking_figure(board: Mapping[str, Any]) -> Figure:
    """Speedup of every row with its interval, best on top, between the baseline and the oracle."""
    rows, y = board["rows"], np.arange(len(board["rows"]))[::-1]
    value, low, high = estimates(row["speedup"] for row in rows)
    oracle = board["oracle"]
    figure, axes = _lines_figure(rows)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.axvspan(oracle["low"], oracle["high"], color=ORACLE, alpha=0.12, linewidth=0)
    axes.axvline(oracle["estimate"], color=ORACLE, linewidth=1.5)
    for at, row, text in zip(y, rows, value, strict=True):
        axes.annotate(f"{text:.3f}", (1, at), (1.01, at), **_beside(axes), color=_color(row, rows))
    bars = spans(value, low, high)
    for color in (LEADING, BEHIND):
        at = np.flatnonzero([_color(row, rows) == color for row in rows])
        if len(at):
            style: dict[str, Any] = {"fmt": "o", "color": color, "markersize": 7, "elinewidth": 1.6, **DOT}
            marks = axes.errorbar(value[at], y[at], xerr=bars[:, at], **style)
            told(marks[0], [interval_told(rows[i]["label"], value[i], low[i], high[i]) for i in at.tolist()])
    for place, text, color in ((1.0, "autoregressive", MUTED), (oracle["estimate"], "oracle", ORACLE)):
        axes.annotate(
            text,
            (place, 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color=color,
            ha="center",
        )
    axes.margins(x=0.04)
    axes.set_xlabel("speedup (ratio, autoregressive = 1), with 95 % intervals")
    return figure


@styled()
def ranking(board: Mapping[str, Any], name: str) -> str:
    """`ranking_figure` as SVG."""
    return svg(ranking_figure(board), f"{name}-ranking", "Policies by speedup")


@styled()
def drafters(rows: Sequence[Row]) -> str:
    """Draw each row's replayed speedup with its interval, and below it the measured one where there is one."""
    y = np.arange(len(rows))[::-1]
    figure, axes = _lines_figure(rows, extra=0.3)
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    style: dict[str, Any] = {"markersize": 7, "elinewidth": 1.6, **DOT}
    value, low, high = estimates(row["speedup"] for row in rows)
    bars = spans(value, low, high)
    replay = "predicted" if rows[0]["measured"] is None else "from own rounds"
    for color, label in ((LEADING, f"{replay}, not significantly behind the leader"), (BEHIND, replay)):
        at = np.flatnonzero([_color(row, rows) == color for row in rows])
        if len(at):
            axes.errorbar(value[at], y[at] + 0.12, xerr=bars[:, at], fmt="o", color=color, label=label, **style)
    for at, row, estimate in zip(y, rows, value, strict=True):
        axes.annotate(f"{estimate:.3f}", (1, at), (1.01, at), **_beside(axes), color=_color(row, rows))
    measured = [(place, row["measured"]) for place, row in zip(y, rows, strict=True) if row["measured"] is not None]
    if measured:
        mid, *ends = estimates(found for _, found in measured)
        axes.errorbar(
            mid,
            [place - 0.16 for place, _ in measured],
            xerr=spans(mid, *ends),
            fmt="D",
            color=ORACLE,
            label="measured",
            **style,
        )
    axes.margins(x=0.04)
    axes.set_xlabel("speedup (ratio, autoregressive = 1), with 95 % intervals")
    figure.legend(loc="outside upper right", ncols=3, handletextpad=0.3, columnspacing=1.4)
    return svg(figure, "drafters-ranking", "Drafters by speedup")


@styled()
def draft_lengths(board: Mapping[str, Any], name: str) -> str:
    """Share of rounds by verified tokens, a line of cells per policy, with the mean; many tokens share cells."""
    rows = board["rows"]
    longest = max(len(row["rounds_by_draft_tokens"]) for row in rows)
    counts = np.array([np.pad(c, (0, longest - len(c))) for c in (row["rounds_by_draft_tokens"] for row in rows)])
    means = counts @ np.arange(longest) / np.maximum(counts.sum(axis=1), 1)
    starts = np.arange(longest)
    if longest > MOST_CELLS:
        starts = np.array([n for n in (*range(17), *range(20, 33, 4), *range(40, 65, 8), 80) if n < longest])
    share = 100 * np.add.reduceat(counts, starts, axis=1) / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    y = np.arange(len(rows))[::-1]
    figure, axes = _lines_figure(rows, extra=0.5)
    axes.grid(visible=False)
    shades = LinearSegmentedColormap.from_list("share", ["#ffffff", "#9cc9e8", "#0072b2", "#00345a"])
    edges = np.arange(share.shape[1] + 1) - 0.5
    cells = axes.pcolormesh(edges, np.arange(len(rows) + 1) - 0.5, share[::-1], cmap=shades, vmin=0, vmax=100)
    cells.set_edgecolor("white")
    cells.set_linewidth(1.5)
    for at, line, mean in zip(y, share, means, strict=True):
        for length in np.flatnonzero(line >= 0.5):
            axes.annotate(
                f"{line[length]:.0f}", (float(length), at), ha="center", va="center", fontsize=8,
                color="white" if line[length] > 45 else INK,
            )  # fmt: skip
        axes.annotate(f"{mean:.2f}", (1, at), (1.01, at), **_beside(axes), color=INK)
    axes.annotate(
        "mean", (1, 1), (1.01, 1.0), va="bottom", xycoords="axes fraction", textcoords="axes fraction", color=MUTED
    )
    axes.set_xticks(np.arange(len(starts)), [str(n) for n in starts])
    axes.set_xlabel("drafted tokens verified in a round, from each number to the next; cells: percent of the rounds")
    return svg(figure, f"{name}-lengths", "Verified tokens")


@styled()
def time_per_token(board: Mapping[str, Any], name: str) -> str:
    """Milliseconds per output token by what they were spent on; with an oracle, the gap to it stands beside."""
    rows, y = board["rows"], np.arange(len(board["rows"]))[::-1]
    figure, axes = _lines_figure(rows, extra=0.3)
    left = np.zeros(len(rows))
    for key, label, color in PARTS:
        width = 1e3 * np.array([row["token_seconds"][key] for row in rows])
        bars = axes.barh(y, width, 0.62, left, color=color, label=label)
        for bar, row, part in zip(bars, rows, width, strict=True):
            told(bar, [f"{row['label']}: {label} {part:.3f} ms per token"])
        left += width
    baseline = 1e3 * board["baseline_token_seconds"]
    axes.axvline(baseline, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="autoregressive")
    if "oracle" in board:
        axes.axvline(baseline / board["oracle"]["estimate"], color=ORACLE, linewidth=1.5, label="oracle")
        for at, row in zip(y, rows, strict=True):
            text = f"+{100 * row['oracle_regret']:.0f} %" if row["oracle_regret"] >= 0 else "below"
            axes.annotate(text, (1, at), (1.01, at), **_beside(axes), color=INK)
        axes.annotate(
            "gap to oracle",
            (1, 1),
            (1.01, 1.0),
            va="bottom",
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=MUTED,
        )
    axes.set_xlim(0, 1.03 * max(left.max(), baseline))
    axes.set_xlabel("milliseconds per output token")
    figure.legend(loc="outside upper right", ncols=6, handlelength=1.2, columnspacing=1.4)
    return svg(figure, f"{name}-time", "Where the time goes")


@styled()
def sensitivity(board: Mapping[str, Any], name: str) -> str:
    """A panel per policy and setting: speedup over the setting's search range, a line per form of the policy."""
    ordered = sorted(board["sensitivity"], key=lambda s: (s["policy"], s["setting"]))  # stable: forms in their order
    panels = [list(group) for _, group in groupby(ordered, key=lambda s: (s["policy"], s["setting"]))]
    lines = math.ceil(len(panels) / PANELS_PER_LINE)
    figure = Figure(figsize=(WIDE, 2.75 * lines + 0.2), layout="constrained")
    figure.get_layout_engine().set(hspace=0.06, wspace=0.03)  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(lines, PANELS_PER_LINE, sharey=True, squeeze=False).ravel()
    best = board["rows"][0]["speedup"]["estimate"]
    for axes, panel in zip(grid, panels, strict=False):
        axes.axhline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.axhline(best, color=LEADING, linewidth=1, alpha=0.6)
        for one, (color, dash) in zip(panel, LINES * len(panel), strict=False):
            _sweep_line(axes, one, color, dash)
        axes.set_title(f"{panel[0]['policy']}\n{panel[0]['setting']}", linespacing=1.3)
        if len(panel) > 1:
            axes.legend(fontsize=8, handlelength=1.8, labelspacing=0.2, loc="best")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::PANELS_PER_LINE]:
        axes.set_ylabel("speedup")
    return svg(figure, f"{name}-sensitivity", "Speedup over the range of each setting")


@styled()
def side_by_side(columns: Sequence[str], labels: Sequence[str], speedups: Sequence[Sequence[float | None]]) -> str:
    """One line per policy, a mark per board. speedups : [policy][board], None where it did not run."""
    y = np.arange(len(labels))[::-1]
    figure = Figure(figsize=(WIDE, 1.4 + 0.3 * len(labels)), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    table = np.array([[np.nan if v is None else v for v in row] for row in speedups], dtype=np.float64)
    for at, row in zip(y, table, strict=True):
        seen = row[np.isfinite(row)]
        axes.plot([seen.min(), seen.max()], [at, at], color=RULE, linewidth=3, zorder=1, solid_capstyle="round")
    colors = ("#0072b2", "#d55e00", "#007a5a", "#7a6fac", "#56b4e9", "#1f2328")
    beside = np.linspace(0.18, -0.18, len(columns))  # marks of one value stay apart
    for number, column in enumerate(columns):
        marker, color = MARKERS[number % len(MARKERS)], colors[number % len(colors)]
        (marks,) = axes.plot(
            table[:, number], y + beside[number], marker, color=color, markersize=7, label=column, **DOT
        )
        drawn = [(label, value) for label, value in zip(labels, table[:, number], strict=True) if np.isfinite(value)]
        told(marks, [f"{label}, {column}: {value:.3f}" for label, value in drawn])
    axes.set_yticks(y, labels, color=INK)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-0.7, len(labels) - 0.3)
    axes.set_xlabel("speedup (ratio, autoregressive = 1)")
    figure.legend(loc="outside upper right", ncols=min(4, len(columns)), handletextpad=0.3, columnspacing=1.4)
    return svg(figure, "boards", "Speedups on every board")


def _lines_figure(rows: Sequence[Row], extra: float = 0.0) -> tuple[Figure, Axes]:
    """A wide figure with a line per row, its label at the left."""
    figure = Figure(figsize=(WIDE, 1.1 + extra + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_yticks(np.arange(len(rows))[::-1], [row["label"] for row in rows], color=INK)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    return figure, axes


def _beside(axes: Axes) -> dict[str, Any]:
    """Arguments of a note in the right margin, at the height of a line."""
    place = axes.get_yaxis_transform()
    return {"xycoords": place, "textcoords": place, "va": "center", "annotation_clip": False}


def _color(row: Row, rows: Sequence[Row]) -> str:
    return LEADING if row is rows[0] or row["tied_with_leader"] else BEHIND


def _sweep_line(axes: Axes, one: Mapping[str, Any], color: str, dash: Any) -> None:
    """One form's line with a dot at its tuned value; choices are places on the axis."""
    label = one["label"].split(", ", 1)[-1]
    values = one["values"]
    if isinstance(one["tuned"], (str, bool)):
        places = list(range(len(values)))
        axes.plot(places, one["speedups"], "o", color=color, markersize=4, label=label, linestyle=dash, linewidth=1)
        axes.set_xticks(places, [str(v).replace("_", "\n") for v in values], fontsize=8)
        axes.plot(values.index(one["tuned"]), one["at_tuned"], "o", color=color, markersize=8, **DOT)
        axes.set_xlim(-0.5, len(values) - 0.5)
        return
    joined = sorted({**dict(zip(values, one["speedups"], strict=True)), one["tuned"]: one["at_tuned"]}.items())
    axes.plot(*zip(*joined, strict=True), color=color, linestyle=dash, linewidth=1.6, label=label)
    (dot,) = axes.plot(one["tuned"], one["at_tuned"], "o", color=color, markersize=7, zorder=4, **DOT)
    told(dot, [f"{one['label']}, {one['setting']} = {one['tuned']:.4g}: {one['at_tuned']:.3f}"])
    if one["log"]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    elif isinstance(one["tuned"], int):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
