"""Style, parts and inline SVG of the figures of every report.

Okabe and Ito's palette, safe for colour-blind readers. Text stays text, so the page's own
font shows it and labels can be searched.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specsim.io.arrays import Floats, IntArray
from specsim.replaying.intervals import Estimate

PREDICTED, MEASURED, ADAPTIVE = "#0072b2", "#d55e00", "#007a5a"
INK, MUTED, RULE = "#1f2328", "#656d76", "#e4e7eb"
TOOLTIPS = "tooltips:"  # begins the id of a group whose marks have tooltips
WIDE = 12.4  # inches, the page's whole width
DOT: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.8}
DASHED: dict[str, Any] = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 3))}  # line of the baseline
COLORS = (PREDICTED, MEASURED, ADAPTIVE, "#7a6fac", "#56b4e9", "#b8860b", INK, "#cc79a7")
MARKERS = "osD^vPX*"
SPEEDUP_AXIS = "speedup (ratio, autoregressive = 1), with 95 % intervals"

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # labels are data: a dollar sign is a dollar sign
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#b6bcc4",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """The report's own style, whatever the user's matplotlibrc says, and only in here."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def estimates(values: Iterable[Mapping[str, float] | Estimate]) -> tuple[Floats, Floats, Floats]:
    """Estimates, lower and upper ends, each [n]."""
    numbers = [value if isinstance(value, Estimate) else Estimate(**value) for value in values]
    table = np.array([(value.estimate, value.low, value.high) for value in numbers], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def spans(value: Floats, low: Floats, high: Floats) -> Floats:
    """Distances to both ends [2, n]; a percentile interval may exclude its own estimate."""
    return np.maximum([value - low, high - value], 0)


def spread(values: npt.ArrayLike, gap: float) -> Floats:
    """Move values to places in the same order that are about `gap` or more from each other."""
    order = np.argsort(values, kind="stable")
    placed = np.asarray(values, dtype=np.float64)[order]
    for _ in range(200):  # neighbours push each other apart
        push = np.maximum(gap - np.diff(placed), 0) / 2
        placed[:-1] -= push
        placed[1:] += push
    return placed[np.argsort(order)]


def add_tooltips(marks: Artist, texts: Iterable[str]) -> None:
    """Give each of these marks, a line's markers or a single bar, a tooltip in a page."""
    marks.set_gid(TOOLTIPS + quote(json.dumps(list(texts))))


def interval_tooltip(label: str, value: float, low: float, high: float) -> str:
    """Write the tooltip of an estimate."""
    return f"{label}: {value:.3f} (95 % interval {low:.3f} to {high:.3f})"


def rows_figure(labels: Sequence[str], height: float, margin: float = 0.6) -> tuple[Figure, Axes, IntArray]:
    """Make a wide figure with a line per label at the left; return figure, axes and heights of the lines [n]."""
    y = np.arange(len(labels))[::-1]
    figure = Figure(figsize=(WIDE, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_yticks(y, labels, color=INK)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(-margin, len(labels) - 1 + margin)
    return figure, axes, y


def draw_intervals(
    axes: Axes,
    y: npt.ArrayLike,
    values: Iterable[Mapping[str, float] | Estimate],
    color: str,
    tooltips: Sequence[str] = (),
    **style: Any,
) -> None:
    """Draw estimates with their intervals at these heights; `tooltips` are their labels."""
    value, low, high = estimates(values)
    style = {"fmt": "o", "markersize": 7, "elinewidth": 1.6, "color": color, **DOT, **style}
    marks = axes.errorbar(value, y, xerr=spans(value, low, high), **style)
    if tooltips:
        add_tooltips(marks[0], map(interval_tooltip, tooltips, value, low, high))


def note_beside(axes: Axes, y: float, text: str, color: str) -> None:
    """Write into the right margin, at the height of a line."""
    place = axes.get_yaxis_transform()
    axes.annotate(
        text, (1, y), (1.01, y), xycoords=place, textcoords=place, va="center", annotation_clip=False, color=color
    )


def _titled(group: re.Match[str]) -> str:
    texts = iter(json.loads(unquote(group[1])))
    mark = "use" if "<use " in group[2] else "path"

    def with_title(match: re.Match[str]) -> str:
        text = next(texts, None)
        return match[0] if text is None else f"<{mark} {match[1]}><title>{html.escape(text)}</title></{mark}>"

    return "<g>" + re.sub(rf"<{mark} ([^>]*)/>", with_title, group[2])


def note_above(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", color=MUTED, fontsize=8.5)


def margin_notes(axes: Axes, notes: Sequence[tuple[float, str, str]]) -> None:
    """Label horizontal things (value, text, color) in the right margin, where they end."""
    low, high = axes.get_ylim()
    places = spread([value for value, *_ in notes], (high - low) * 0.06)
    for (value, text, color), y in zip(notes, places, strict=True):
        axes.annotate(
            text,
            (1, value),
            (1.03, y),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            color=color,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 0},
        )


def svg(figure: Figure, name: str, title: str) -> str:
    """The figure as an inline <svg>: same bytes every time, ids that no other figure shares."""
    buffer = io.StringIO()
    matplotlib.rcParams["svg.hashsalt"] = name
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, _, svg = buffer.getvalue().partition("<svg ")  # leaves the XML prolog out
    svg = re.sub(rf'<g id="{TOOLTIPS}([^"]*)">(.*?)(?=<g id=|\Z)', _titled, svg, flags=re.DOTALL)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    size_free = re.sub(r'^width="[^"]*" height="[^"]*" ', "", svg)
    return f'<svg role="img" aria-label="{html.escape(title)}" {size_free}'  # Matplotlib and _titled escape all text
