"""What the figures of every report share: style, labels that keep apart, and inline SVG.

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

from specsim.io.arrays import Floats

PREDICTED, MEASURED, ADAPTIVE = "#0072b2", "#d55e00", "#007a5a"
INK, MUTED, RULE = "#1f2328", "#656d76", "#e4e7eb"
TOLD = "told:"  # begins the id of a group whose marks say something
DOT: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.8}

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


def estimates(values: Iterable[Mapping[str, float]]) -> tuple[Floats, Floats, Floats]:
    """Estimates, lower and upper ends, each [n]."""
    table = np.array([(v["estimate"], v["low"], v["high"]) for v in values], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def spans(value: Floats, low: Floats, high: Floats) -> Floats:
    """Distances to both ends [2, n]; a percentile interval may exclude its own estimate."""
    return np.maximum([value - low, high - value], 0)


def spread(values: npt.ArrayLike, gap: float) -> Floats:
    """Places near these values, in the same order, about `gap` or more apart."""
    order = np.argsort(values, kind="stable")
    placed = np.asarray(values, dtype=np.float64)[order]
    for _ in range(200):  # neighbours push each other apart
        push = np.maximum(gap - np.diff(placed), 0) / 2
        placed[:-1] -= push
        placed[1:] += push
    return placed[np.argsort(order)]


def told(marks: Artist, texts: Sequence[str]) -> None:
    """Have each of these marks, a line's markers or one bar, say a text where the pointer is on it in a page."""
    marks.set_gid(TOLD + quote(json.dumps(list(texts))))


def interval_told(label: str, value: float, low: float, high: float) -> str:
    """What a mark says of an estimate."""
    return f"{label}: {value:.3f} (95 % interval {low:.3f} to {high:.3f})"


def _titled(group: re.Match[str]) -> str:
    """A group of an SVG with the texts that `told` gave its marks."""
    texts = iter(json.loads(unquote(group[1])))
    mark = "use" if "<use " in group[2] else "path"

    def with_title(found: re.Match[str]) -> str:
        text = next(texts, None)
        return found[0] if text is None else f"<{mark} {found[1]}><title>{html.escape(text)}</title></{mark}>"

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
    svg = re.sub(rf'<g id="{TOLD}([^"]*)">(.*?)(?=<g id=|\Z)', _titled, svg, flags=re.DOTALL)
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    size_free = re.sub(r'^width="[^"]*" height="[^"]*" ', "", svg)
    return f'<svg role="img" aria-label="{html.escape(title)}" {size_free}'  # Matplotlib and _titled escape all text
