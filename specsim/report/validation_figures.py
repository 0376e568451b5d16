"""Figures of a validation report, each a function from plain data to inline SVG.

Blue is predicted, orange is measured, green is the best tuned adaptive policy, in every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specsim.io.arrays import Floats
from specsim.report import drawing
from specsim.report.experiment import Histogram, KCurve, Reliability, Row

EQ14 = "#7a6fac"
ACCEPTABLE_ERROR = 0.05  # half-width of the band around perfect prediction
HALF_PAGE = (6.0, 4.5)  # inches
TITLE_CHARACTERS = 60  # a line of a title over half a page
NAMED = 8  # more policies leave no room for their names: each mark says its own
COUNT_LABELS_UP_TO = 13  # more bars than this leave no room for a number on each

RUNGS = (  # key, legend, marker, color
    ("measured", "measured", "D", drawing.MEASURED),
    ("eq14", "Eq. 14", "s", EQ14),
    ("profile", "cost profile", "o", drawing.PREDICTED),
)
SCATTER_GROUPS = (  # role, legend, line, face
    ("tuned", "tuned", drawing.ADAPTIVE, drawing.ADAPTIVE),
    ("fitted", "fitted", EQ14, EQ14),
    ("default", "default", drawing.ADAPTIVE, "white"),
    ("fixed_k", "fixed K", drawing.PREDICTED, drawing.PREDICTED),
)


@drawing.styled()
def speedup_against_k(curve: KCurve, rows: Sequence[Row]) -> str:
    """Predicted curve over K with its interval; measured fixed-K points; the best adaptive line."""
    k = np.asarray(curve.k)
    value, low, high = drawing.estimates(curve.predicted)
    fixed = sorted((r for r in rows if r.policy == "fixed_k"), key=lambda r: r.params["k"])
    adaptive = best_adaptive(rows)
    figure = Figure(figsize=HALF_PAGE, layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, **drawing.DASHED)
    notes = [(1.0, "autoregressive", drawing.MUTED)]
    if adaptive:
        measured = adaptive.measured
        axes.axhspan(measured.low, measured.high, color=drawing.ADAPTIVE, alpha=0.10, linewidth=0)
        axes.axhline(measured.estimate, color=drawing.ADAPTIVE, linewidth=1.5)
        notes.append((measured.estimate, f"{adaptive.policy}, tuned", drawing.ADAPTIVE))
    axes.fill_between(k, low, high, color=drawing.PREDICTED, alpha=0.18, linewidth=0)
    axes.plot(k, value, color=drawing.PREDICTED, linewidth=2)
    notes.append((float(value[-1]), "fixed K, predicted", drawing.PREDICTED))
    if fixed:
        at = [r.params["k"] for r in fixed]
        mid, *ends = drawing.estimates([r.measured for r in fixed])
        marks = axes.errorbar(
            at,
            mid,
            drawing.spans(mid, *ends),
            fmt="o",
            color=drawing.MEASURED,
            markersize=6,
            elinewidth=1.5,
            zorder=4,
            **drawing.DOT,
        )
        drawing.add_tooltips(marks[0], map(drawing.interval_tooltip, [f"measured, K = {k}" for k in at], mid, *ends))
        notes.append((float(mid[-1]), "fixed K, measured", drawing.MEASURED))
    axes.set_xlim(k[0] - 0.4, k[-1] + 0.4)
    axes.margins(y=0.10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("draft length K (tokens)")
    axes.set_ylabel("speedup (ratio, autoregressive = 1)")
    drawing.margin_notes(axes, notes)
    return drawing.svg(figure, "k-curve", "Speedup against draft length K")


@drawing.styled()
def accepted_histogram(histogram: Histogram) -> str:
    """Rounds by accepted draft tokens, predicted beside measured, in percent of rounds."""
    counts = np.array([histogram.predicted, histogram.measured], dtype=np.float64)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    accepted = np.arange(counts.shape[1])
    figure = Figure(figsize=HALF_PAGE, layout="constrained")
    axes = figure.subplots()
    for i, (name, color) in enumerate((("predicted", drawing.PREDICTED), ("measured", drawing.MEASURED))):
        label = f"{name}, {counts[i].sum():,.0f} rounds"
        bars = axes.bar(accepted + 0.42 * i - 0.21, share[i], 0.4, color=color, label=label)
        for bar, tokens, part in zip(bars, accepted, share[i], strict=True):
            drawing.add_tooltips(bar, [f"{name}: {part:.1f} % of the rounds accept {tokens}"])
    if len(accepted) <= COUNT_LABELS_UP_TO:
        for x in np.flatnonzero(counts[1]):
            text = f"{share[1, x]:.0f}" if share[1, x] >= 0.5 else "<1"
            drawing.note_above(axes, text, float(x), share[:, x].max())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    axes.set_xlabel("accepted draft tokens in a round")
    axes.set_ylabel("share of rounds (%)")
    axes.set_title(fill(histogram.label, TITLE_CHARACTERS))
    axes.legend(loc="upper right", handlelength=1, handleheight=1)
    return drawing.svg(figure, "histogram", "Accepted draft tokens per round")


@drawing.styled()
def reliability_diagram(bins: Reliability) -> str:
    """Acceptance against confidence, with the gap to the diagonal and tokens per bin below."""
    edges = np.asarray(bins.edges, dtype=np.float64)
    count = np.asarray(bins.count, dtype=np.float64)
    # A null, the mean of an empty bin, becomes NaN here.
    confidence, rate = (np.array(getattr(bins, name), dtype=np.float64) for name in ("mean_confidence", "accept_rate"))
    seen = np.isfinite(confidence) & np.isfinite(rate)
    figure = Figure(figsize=HALF_PAGE, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    above.plot([0, 1], [0, 1], **drawing.DASHED)
    above.annotate("calibrated", (0.02, 0.19), color=drawing.MUTED, fontsize=8.5)
    above.vlines(confidence[seen], confidence[seen], rate[seen], color=drawing.MEASURED, linewidth=4, alpha=0.3)
    above.plot(confidence[seen], rate[seen], "o-", color=drawing.MEASURED, linewidth=1.5, markersize=6, **drawing.DOT)
    above.set_xlim(0, 1)
    above.set_ylim(0, 1.03)
    above.set_ylabel("share accepted")
    above.set_title(f"ECE {bins.ece:.3f} over {count.sum():,.0f} drafted tokens")
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    below.bar(middle, count, width * 0.92, color="#aab2bd")
    for x, n in zip(middle, count, strict=True):
        drawing.note_above(below, f"{n:.0f}" if n < 1000 else f"{n / 1000:.1f}k", x, n)
    below.grid(visible=False)
    below.margins(y=0.35)
    below.set_yticks([])
    below.spines["left"].set_visible(False)
    below.set_ylabel("tokens")
    below.set_xlabel("drafter's confidence (probability of its top token)")
    return drawing.svg(figure, "reliability", "Confidence against acceptance")


@drawing.styled()
def error_ladder(rows: Sequence[Row]) -> str:
    """Draw the signed error of each rung against the measured speedup, a line per policy."""
    truth = np.array([r.ladder.measured for r in rows])
    # None, of a rung that a policy does not have, becomes NaN and is not drawn.
    errors = 100 * (np.array([[getattr(r.ladder, name) for r in rows] for name, *_ in RUNGS], dtype=float) / truth - 1)
    _, low, high = drawing.estimates([r.measured for r in rows])
    figure, axes, y = drawing.rows_figure([row.label for row in rows], 1.3 + 0.3 * len(rows), margin=0.7)
    axes.axvline(0, color=drawing.MEASURED, linewidth=1.2)
    axes.hlines(y, np.nanmin(errors, axis=0), np.nanmax(errors, axis=0), color="#ccd2d9", linewidth=1.2)
    left, width = 100 * (low / truth - 1), 100 * (high - low) / truth
    axes.barh(y, width, 0.5, left, color=drawing.MEASURED, alpha=0.22, label="measured, 95 % interval")
    for error, (_, label, marker, color) in zip(errors, RUNGS, strict=True):
        (marks,) = axes.plot(error, y, marker, color=color, markersize=7, label=label, **drawing.DOT)
        drawn = [(row.label, value) for row, value in zip(rows, error, strict=True) if np.isfinite(value)]
        drawing.add_tooltips(marks, [f"{policy}, {label}: {value:+.2f} %" for policy, value in drawn])
    axes.margins(x=0.06)
    axes.xaxis.set_major_formatter("{x:+g}")
    axes.set_xlabel("error of the predicted speedup (%): left too pessimistic, right too optimistic")
    figure.legend(loc="outside upper right", ncols=5, handletextpad=0.4, columnspacing=1.4)
    return drawing.svg(figure, "ladder", "Error of each simplification")


@drawing.styled()
def predicted_against_measured(rows: Sequence[Row]) -> str:
    """Draw a cross per policy: measured on x, predicted on y, with the identity and a 5 % band."""
    x, *x_ends = drawing.estimates([r.measured for r in rows])
    y, *y_ends = drawing.estimates([r.predicted for r in rows])
    everything = np.concatenate([x, y, *x_ends, *y_ends])
    pad = 0.22 * max(float(np.ptp(everything)), 0.05)
    span = np.array([everything.min() - pad, everything.max() + pad])
    figure = Figure(figsize=HALF_PAGE, layout="constrained")
    axes = figure.subplots()
    band = (1 - ACCEPTABLE_ERROR) * span, (1 + ACCEPTABLE_ERROR) * span
    axes.grid(visible=True, axis="both")
    axes.fill_between(span, *band, color="#8c959f", alpha=0.14, linewidth=0)
    axes.plot(span, span, color=drawing.MUTED, linewidth=1)
    x_spans, y_spans = drawing.spans(x, *x_ends), drawing.spans(y, *y_ends)
    for role, label, color, face in SCATTER_GROUPS:
        at = np.flatnonzero([row.role == role for row in rows])
        if not len(at):
            continue
        marks = axes.errorbar(
            x[at],
            y[at],
            y_spans[:, at],
            x_spans[:, at],
            fmt="o",
            color=color,
            markerfacecolor=face,
            markersize=5.5,
            elinewidth=1,
            label=label,
            zorder=4,
        )
        drawing.add_tooltips(
            marks[0], [f"{rows[i].label}: measured {x[i]:.3f}, predicted {y[i]:.3f}" for i in at.tolist()]
        )
    if len(rows) <= NAMED:
        _leader_notes(axes, x, y, [_short_name(row) for row in rows], float(np.ptp(span)))
    axes.set_xlim(*span)
    axes.set_ylim(*span)
    axes.set_aspect("equal")
    axes.set_xlabel("measured speedup (ratio)")
    axes.set_ylabel("predicted speedup (ratio)")
    axes.legend(loc="upper left", handletextpad=0.2)
    return drawing.svg(figure, "scatter", "Predicted against measured speedup")


def best_adaptive(rows: Sequence[Row]) -> Row | None:
    """The tuned policy other than fixed K with the largest measured speedup."""
    tuned = [row for row in rows if row.role == "tuned" and row.policy != "fixed_k"]
    return max(tuned, key=lambda row: row.measured, default=None)


def _leader_notes(axes: Axes, x: Floats, y: Floats, texts: Sequence[str], span: float) -> None:
    """Label points along a diagonal, by turns above left and below right of it."""
    order = np.argsort(x, kind="stable")
    for side, align in ((-1, "right"), (1, "left")):
        at = order[(1 - side) // 2 :: 2]
        for i, height in zip(at, drawing.spread(y[at] - side * 0.10 * span, 0.045 * span), strict=True):
            axes.annotate(
                texts[i],
                (x[i], y[i]),
                (x[i] + side * 0.05 * span, height),
                ha=align,
                va="center",
                fontsize=8.5,
                color=drawing.MUTED,
                arrowprops={"arrowstyle": "-", "color": "#b6bcc4", "linewidth": 0.7, "shrinkB": 3},
            )


def _short_name(row: Row) -> str:
    return f"K = {row.params['k']}" if row.policy == "fixed_k" else f"{row.policy}, {row.role}"
