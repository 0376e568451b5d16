"""Figures of a leaderboard report, each a function from plain data to inline SVG.

Green is the leader and the rows whose difference to it is not significant, blue is the rest, orange the
oracle, in every figure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from specsim.io.arrays import IntArray
from specsim.replaying.intervals import Estimate
from specsim.report import drawing
from specsim.report.board import RankedRow
from specsim.report.experiment import BoardRow

LEADING, BEHIND, ORACLE = "#007a5a", "#0072b2", "#d55e00"
PARTS = (  # key, legend, color
    ("draft", "drafting", "#0072b2"),
    ("policy", "deciding", "#1f2328"),
    ("verify", "verification", "#9cc9e8"),
    ("other", "rest of the round", "#c9ced6"),
)
BOARD_COLORS = ("#0072b2", "#d55e00", "#007a5a", "#7a6fac", "#56b4e9", "#1f2328")
MOST_CELLS = 21  # of a line, before numbers of tokens share cells


@drawing.styled()
def ranking_figure(rows: Sequence[RankedRow], oracle: float) -> Figure:
    """Speedup of every row with its interval, best on top, between the baseline and the oracle."""
    figure, axes, y = _board_figure(rows)
    axes.axvline(1, **drawing.DASHED)
    for height, row in zip(y, rows, strict=True):
        drawing.note_beside(axes, height, f"{row.speedup:.3f}", _color(row, rows))
    for color in (LEADING, BEHIND):
        at = [place for place, row in enumerate(rows) if _color(row, rows) == color]
        if at:
            drawing.draw_intervals(axes, y[at], [rows[i].speedup for i in at], color, [rows[i].label for i in at])
    places = {
        "autoregressive": (1.0, "data", "center", drawing.MUTED)
    }  # the oracle may be so far away that rows look alike
    places[f"oracle {oracle:.2f} \u2192"] = (1.0, "axes fraction", "right", ORACLE)
    for text, (place, unit, align, color) in places.items():
        axes.annotate(
            text,
            (place, 1),
            (0, 4),
            xycoords=(unit, "axes fraction"),
            textcoords="offset points",
            color=color,
            ha=align,
        )
    axes.margins(x=0.04)
    axes.set_xlabel(drawing.SPEEDUP_AXIS)
    return figure


@drawing.styled()
def ranking(rows: Sequence[RankedRow], oracle: float, name: str) -> str:
    """`ranking_figure` as SVG."""
    return drawing.svg(ranking_figure(rows, oracle), f"{name}-ranking", "Policies by speedup")


@drawing.styled()
def drafters(rows: Sequence[BoardRow]) -> str:
    """Draw each row's replayed speedup with its interval, and below it the measured speedup, if any."""
    figure, axes, y = _board_figure(rows, extra=0.3)
    axes.axvline(1, **drawing.DASHED)
    replay = "predicted" if rows[0].measured is None else "from own rounds"
    for color, label in ((LEADING, f"{replay}, not significantly behind the leader"), (BEHIND, replay)):
        at = [place for place, row in enumerate(rows) if _color(row, rows) == color]
        if at:
            drawing.draw_intervals(axes, y[at] + 0.12, [rows[i].speedup for i in at], color, label=label)
    for height, row in zip(y, rows, strict=True):
        drawing.note_beside(axes, height, f"{row.speedup:.3f}", _color(row, rows))
    at = [place for place, row in enumerate(rows) if row.measured is not None]
    measured = [row.measured for row in rows if row.measured is not None]
    if at:
        drawing.draw_intervals(axes, y[at] - 0.16, measured, ORACLE, fmt="D", label="measured")
    axes.margins(x=0.04)
    axes.set_xlabel(drawing.SPEEDUP_AXIS)
    figure.legend(loc="outside upper right", ncols=3, handletextpad=0.3, columnspacing=1.4)
    return drawing.svg(figure, "drafters-ranking", "Drafters by speedup")


@drawing.styled()
def draft_lengths(rows: Sequence[RankedRow], name: str) -> str:
    """Share of rounds by verified tokens, a line of cells per policy, with the mean; many tokens share cells."""
    longest = max(len(row.rounds_by_draft_tokens) for row in rows)
    counts = np.array([np.pad(c, (0, longest - len(c))) for c in (row.rounds_by_draft_tokens for row in rows)])
    means = counts @ np.arange(longest) / np.maximum(counts.sum(axis=1), 1)
    starts = np.arange(longest)
    if longest > MOST_CELLS:
        starts = np.array([n for n in (*range(17), *range(20, 33, 4), *range(40, 65, 8), 80) if n < longest])
    share = 100 * np.add.reduceat(counts, starts, axis=1) / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure, axes, y = _board_figure(rows, extra=0.5)
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
                color="white" if line[length] > 45 else drawing.INK,
            )  # fmt: skip
        drawing.note_beside(axes, at, f"{mean:.2f}", drawing.INK)
    _margin_heading(axes, "mean")
    axes.set_xticks(np.arange(len(starts)), [str(n) for n in starts])
    axes.set_xlabel("drafted tokens verified in a round, from each number to the next; cells: percent of the rounds")
    return drawing.svg(figure, f"{name}-lengths", "Verified tokens")


@drawing.styled()
def time_per_token(
    rows: Sequence[RankedRow | BoardRow],
    baseline_s: float,
    name: str,
    oracle: Estimate | None = None,
    gaps: Sequence[float] = (),
) -> str:
    """Milliseconds per output token by what they were spent on; with an oracle, the rows' gaps to it stand beside.

    baseline_s : seconds of a token without speculation
    """
    figure, axes, y = _board_figure(rows, extra=0.3)
    left = np.zeros(len(rows))
    for key, label, color in PARTS:
        width = 1e3 * np.array([getattr(row.token_seconds, key) for row in rows])
        bars = axes.barh(y, width, 0.62, left, color=color, label=label)
        for bar, row, part in zip(bars, rows, width, strict=True):
            drawing.add_tooltips(bar, [f"{row.label}: {label} {part:.3f} ms per token"])
        left += width
    baseline = 1e3 * baseline_s
    axes.axvline(baseline, **drawing.DASHED, label="autoregressive")
    if oracle is not None:
        axes.axvline(baseline / oracle, color=ORACLE, linewidth=1.5, label="oracle")
        for at, gap in zip(y, gaps, strict=True):
            text = f"+{100 * gap:.0f} %" if gap >= 0 else "below"
            drawing.note_beside(axes, at, text, drawing.INK)
        _margin_heading(axes, "gap to oracle")
    axes.set_xlim(0, 1.03 * max(left.max(), baseline))
    axes.set_xlabel("milliseconds per output token")
    figure.legend(loc="outside upper right", ncols=6, handlelength=1.2, columnspacing=1.4)
    return drawing.svg(figure, f"{name}-time", "Where the time goes")


@drawing.styled()
def side_by_side(columns: Sequence[str], labels: Sequence[str], speedups: Sequence[Sequence[float | None]]) -> str:
    """Draw a line per policy, a mark per board. speedups : [policy][board], None where it did not run."""
    figure, axes, y = drawing.rows_figure(labels, 1.4 + 0.3 * len(labels), margin=0.7)
    axes.axvline(1, **drawing.DASHED)
    table = np.array([[np.nan if v is None else v for v in row] for row in speedups], dtype=np.float64)
    for at, row in zip(y, table, strict=True):
        seen = row[np.isfinite(row)]
        axes.plot([seen.min(), seen.max()], [at, at], color=drawing.RULE, linewidth=3, zorder=1, solid_capstyle="round")
    beside = np.linspace(0.18, -0.18, len(columns))  # equal values stay visible
    for number, column in enumerate(columns):
        marker, color = drawing.MARKERS[number % len(drawing.MARKERS)], BOARD_COLORS[number % len(BOARD_COLORS)]
        (marks,) = axes.plot(
            table[:, number], y + beside[number], marker, color=color, markersize=7, label=column, **drawing.DOT
        )
        drawn = [(label, value) for label, value in zip(labels, table[:, number], strict=True) if np.isfinite(value)]
        drawing.add_tooltips(marks, [f"{label}, {column}: {value:.3f}" for label, value in drawn])
    axes.set_xlabel("speedup (ratio, autoregressive = 1)")
    figure.legend(loc="outside upper right", ncols=min(4, len(columns)), handletextpad=0.3, columnspacing=1.4)
    return drawing.svg(figure, "boards", "Speedups on every board")


def _board_figure(rows: Sequence[RankedRow | BoardRow], extra: float = 0.0) -> tuple[Figure, Axes, IntArray]:
    return drawing.rows_figure([row.label for row in rows], 1.1 + extra + 0.3 * len(rows))


def _margin_heading(axes: Axes, text: str) -> None:
    coordinates = "axes fraction"
    axes.annotate(
        text, (1, 1), (1.01, 1.0), va="bottom", xycoords=coordinates, textcoords=coordinates, color=drawing.MUTED
    )


def _color(row: RankedRow | BoardRow, rows: Sequence[RankedRow | BoardRow]) -> str:
    return LEADING if row is rows[0] or row.tied_with_leader else BEHIND
