"""Figures of a benchmark: ratios to the floor, a roofline, and tree attention against tree size and context.

Loads matplotlib; import it where figures are drawn. Colours are Okabe and Ito's, one per
backend in every figure, each with a marker of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from speckernels.bench.rows import TIMED_MODES, Document, Row
from speckernels.bench.runner import BACKENDS

MARKS: dict[str, tuple[str, str]] = {  # color, marker
    "torch": ("#7a7f87", "o"),
    "torch_compile": ("#56b4e9", "v"),
    "triton": ("#0072b2", "s"),
    "cuda": ("#d55e00", "D"),
    "sdpa": ("#007a5a", "^"),
    "sdpa_expanded": ("#7dbb5a", "<"),
    "flex": ("#7a6fac", "P"),
    "flashinfer": ("#cc79a7", "X"),
    "sdpa_packed": ("#009e73", ">"),
    "sdpa_cudnn": ("#b5a516", "h"),
    "prefix_merge": ("#e69f00", "p"),
    "flex_tuned": ("#4b3f8f", "*"),
    "xqa": ("#8c2d5a", "d"),
}
MODE_TITLES = {"launch": "one eager call from Python", "graph": "inside a CUDA graph", "cpu": "on the CPU"}
INK, MUTED, RULE = "#1f2328", "#656d76", "#e4e7eb"
SPREAD = 0.62  # height of an operation's lanes, of 1
NODES, CONTEXT, KV_HEADS = 64, 8192, 8  # what the attention figures hold fixed
DPI = 150

STYLE: dict[Any, Any] = {
    "text.parse_math": False,
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
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def draw(document: Document, folder: Path) -> list[Path]:
    """Write the figures that the document has data for, as PNG, and return their paths."""
    rows = [row for row in document.rows if row.mode in TIMED_MODES and row.median_us is not None]
    rows = [row for row in rows if row.backend in BACKENDS]
    attention = [row for row in rows if row.op == "tree_attention" and _is_drawn(row)]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with _styled():
        band = "Medians; bands from 20 % to 80 % of the repeats."
        for name, figure, spread in (
            ("ratio_to_floor", _ratios(rows), "One point a shape, at its median time."),
            ("roofline", _roofline(rows, document), "One point a shape, at its median time."),
            ("tree_attention_nodes", _attention(attention, "nodes", "context", CONTEXT, "tree size (nodes)"), band),
            (
                "tree_attention_context",
                _attention(attention, "context", "nodes", NODES, "context (cached tokens)"),
                band,
            ),
        ):
            if figure is not None:
                _caption(figure, document, spread)
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=DPI)
                files.append(path)
    return files


def _is_drawn(row: Row) -> bool:
    """Whether the figures of tree attention can show it."""
    whole = all(row.shape.get(name, 0) > 0 for name in ("batch", "context", "nodes", "q_heads", "head"))
    timed = None not in (row.p20_us, row.p80_us, row.floor_us)
    return whole and timed and row.shape.get("kv_heads") == KV_HEADS and "page" not in row.shape


def _ratios(rows: Sequence[Row]) -> Figure | None:
    """One panel per mode; per operation a lane for each backend, a dot per case, a bar at the median."""
    modes = [mode for mode in TIMED_MODES if any(row.mode == mode for row in rows)]
    if not modes:
        return None
    names = list(dict.fromkeys(row.op for row in rows))
    backends = [name for name in BACKENDS if any(row.backend == name for row in rows)]
    figure = Figure(figsize=(4.6 + 3.8 * len(modes), 1.6 + 0.62 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for panel, mode in zip(panels, modes, strict=True):
        ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in rows:
            if row.mode == mode and row.ratio_to_floor is not None:
                ratios[row.op, row.backend].append(row.ratio_to_floor)
        for (op, backend), values in ratios.items():
            lanes = [name for name in backends if (op, name) in ratios]
            lane = names.index(op) + SPREAD * ((lanes.index(backend) + 0.5) / len(lanes) - 0.5)
            color, marker = MARKS[backend]
            panel.plot(values, [lane] * len(values), marker, color=color, markersize=3.6, alpha=0.55, markeredgewidth=0)
            middle = median(values)
            half = 0.5 * SPREAD / len(lanes)
            panel.plot([middle, middle], [lane - half, lane + half], color=color, linewidth=2.4, solid_capstyle="butt")
        panel.axvline(1, color=INK, linewidth=1)
        panel.set_xscale("log")
        panel.set_xlim(left=0.8)
        _log_axis(panel, "x")
        panel.set_title(MODE_TITLES[mode])
        panel.set_xlabel("time / floor (ratio; 1 is the measured limit)")
        for border in range(1, len(names)):
            panel.axhline(border - 0.5, color=RULE, linewidth=0.8)
        panel.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    panels[0].tick_params(axis="y", labelcolor=INK)
    _legend(figure, backends, ("median of the cases", "|"))
    return figure


def _roofline(rows: Sequence[Row], document: Document) -> Figure | None:
    """Rate against arithmetic intensity, a panel per mode, below the roof of copy bandwidth and matrix rate."""
    rows = [row for row in rows if row.flops and row.bytes and row.achieved_tflop_s]
    modes = [mode for mode in TIMED_MODES if any(row.mode == mode for row in rows)]
    if not modes:
        return None
    peak, slope = document.ceilings.matmul_tflop_s, document.ceilings.copy_gb_s / 1e3  # TFLOP/s, and a FLOP/byte
    points = [(row, (row.flops or 0) / (row.bytes or 1), row.achieved_tflop_s or 0.0) for row in rows]
    low, high = min(x for _, x, _ in points) / 2, max([2 * peak / slope, *(2 * x for _, x, _ in points)])
    figure = Figure(figsize=(3.2 + 4.4 * len(modes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    backends = [name for name in BACKENDS if any(row.backend == name for row in rows)]
    for panel, mode in zip(panels, modes, strict=True):
        for row, intensity, rate in points:
            if row.mode == mode:
                color, marker = MARKS[row.backend]
                panel.plot(intensity, rate, marker, color=color, markersize=4.5, alpha=0.7, markeredgewidth=0)
        knee = peak / slope
        panel.plot([low, knee, high], [low * slope, peak, peak], color=INK, linewidth=1.3, linestyle=(0, (4, 2)))
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_title(MODE_TITLES[mode])
        panel.set_xlabel("arithmetic intensity (operations / byte)")
        _log_axis(panel, "x")
        _log_axis(panel, "y")
    panels[0].set_ylabel("rate (TFLOP/s)")
    _legend(figure, backends, ("what the device reaches", "--"))
    return figure


def _attention(rows: Sequence[Row], x: str, fixed: str, at: int, label: str) -> Figure | None:
    """Time against one size with the other fixed: a panel per mode and batch, the floor drawn in."""
    rows = [row for row in rows if row.shape[fixed] == at]
    keys = [(m, b) for m in TIMED_MODES for b in sorted({row.shape["batch"] for row in rows if row.mode == m})]
    if len({row.shape[x] for row in rows}) < 2:
        return None
    modes = list(dict.fromkeys(mode for mode, _ in keys))
    batches = sorted({batch for _, batch in keys})
    figure = Figure(figsize=(3.2 + 3.7 * len(batches), 1.4 + 2.8 * len(modes)), layout="constrained")
    panels = figure.subplots(len(modes), len(batches), sharex=True, sharey="row", squeeze=False)
    backends = [name for name in BACKENDS if any(row.backend == name for row in rows)]
    for mode, batch in keys:
        panel = panels[modes.index(mode)][batches.index(batch)]
        here = [row for row in rows if (row.mode, row.shape["batch"]) == (mode, batch)]
        for backend in backends:
            line = sorted((row.shape[x], row) for row in here if row.backend == backend)
            if line:
                _line(panel, [size for size, _ in line], [row for _, row in line], backend)
        floor = sorted({row.shape[x]: row.floor_us for row in here}.items())
        panel.plot(*zip(*floor, strict=True), color=INK, linewidth=1.3, linestyle=(0, (4, 2)))
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"batch {batch}, {MODE_TITLES[mode]}")
        panel.set_xticks(sorted({row.shape[x] for row in rows}))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.xaxis.set_minor_locator(NullLocator())
        _log_axis(panel, "y")
    for panel in panels[-1]:
        panel.set_xlabel(label)
    for line_of_panels in panels:
        line_of_panels[0].set_ylabel("time of one call (us)")
    sizes = rows[0].shape
    what = f"{at:,} cached tokens" if fixed == "context" else f"trees of {at} nodes"
    heads = f"{sizes['q_heads']} query heads, {sizes['kv_heads']} KV heads of {sizes['head']}"
    figure.suptitle(f"Tree attention, {what}, {heads}, {rows[0].dtype}", x=0.01, ha="left", fontsize=11)
    _legend(figure, backends, ("floor", "--"))
    return figure


def _line(panel: Axes, sizes: Sequence[int], rows: Sequence[Row], backend: str) -> None:
    """Medians as a line, 20 % to 80 % as a band."""
    color, marker = MARKS[backend]
    low, middle, high = ([getattr(row, name) for row in rows] for name in ("p20_us", "median_us", "p80_us"))
    panel.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
    panel.plot(sizes, middle, color=color, marker=marker, markersize=5, linewidth=1.6, markeredgecolor="white")


def _log_axis(panel: Axes, which: str) -> None:
    """Plain numbers at 1, 2 and 5 where the range is small, else at powers of ten."""
    axis, (low, high) = (panel.xaxis, panel.get_xlim()) if which == "x" else (panel.yaxis, panel.get_ylim())
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, backends: Sequence[str], extra: tuple[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=MARKS[name][0], marker=MARKS[name][1], linewidth=0, markersize=6, label=name)
        for name in backends
    ]
    text, kind = extra
    if kind == "--":
        handles.append(Line2D([], [], color=INK, linewidth=1.3, linestyle=(0, (4, 2)), label=text))
    else:
        handles.append(Line2D([], [], color=INK, marker="|", markersize=10, markeredgewidth=2, linewidth=0, label=text))
    figure.legend(handles=handles, loc="outside right upper")


def _caption(figure: Figure, document: Document, spread: str) -> None:
    """Device, date, versions and ceilings under the figure."""
    versions, reached = defaultdict(lambda: "unknown", document.versions), document.ceilings
    text = (
        f"{document.device}, {document.date[:10]}; torch {versions['torch']}, triton {versions['triton']}, "
        f"CUDA {versions['cuda']}, kernels {versions['speckernels']}.\n"
        f"Floor: the largest of bytes / {reached.copy_gb_s:,.0f} GB/s, operations / {reached.matmul_tflop_s:,.3g} "
        f"TFLOP/s, and launch latency, all measured in the same run. {spread}"
    )
    figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=MUTED)
