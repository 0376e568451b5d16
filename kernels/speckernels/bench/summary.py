"""Summary of a document: ratio to the floor by operation and backend, and failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import median

from speckernels.bench.rows import HOST_MODE, TIMED_MODES, Document, Row
from speckernels.bench.runner import BACKENDS

HEADER = ("operation", "mode", "cases", *BACKENDS, "fastest")


def ratio_table(document: Document) -> list[list[str]]:
    """Rows under HEADER: per operation and mode the median ratio to the floor over its cases.

    "fastest" names the backend with the least time in most cases. What an eager call costs the
    host is in microseconds, as it has no floor. Modes that say nothing of speed show only how many
    cases were correct.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in document.rows:
        groups[row.op, row.mode].append(row)
    table = []
    for (op, mode), rows in groups.items():
        by_backend: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_backend[row.backend].append(row)
        cells = [_cell(by_backend[name], mode) if name in by_backend else "" for name in BACKENDS]
        cases = len({(row.label, row.dtype) for row in rows})
        table.append([op, mode, str(cases), *cells, _fastest(rows) if mode in TIMED_MODES else ""])
    return table


DETAILS = (
    "operation",
    "case",
    "type",
    "mode",
    "backend",
    "us",
    "20 to 80 %",
    "floor us",
    "% of copy",
    "% of matrix peak",
)


def detail_table(document: Document) -> list[list[str]]:
    """Rows under DETAILS: every time of the document, in per cent of the bandwidth and of the matrix rate measured."""
    ceilings = document.ceilings
    return [
        [
            row.op,
            row.label,
            row.dtype,
            row.mode,
            row.backend,
            f"{row.median_us:.1f}",
            f"{row.p20_us:.1f} to {row.p80_us:.1f}",
            f"{row.floor_us:.1f}",
            f"{100 * row.achieved_gb_s / ceilings.copy_gb_s:.0f}",
            f"{100 * row.achieved_tflop_s / ceilings.matmul_tflop_s:.1f}",
        ]
        for row in document.rows
        if row.median_us and row.floor_us and row.achieved_gb_s is not None and row.achieved_tflop_s is not None
    ]


def _cell(rows: list[Row], mode: str) -> str:
    failed = sum(row.error is not None for row in rows)
    if mode == HOST_MODE:
        times = [row.median_us for row in rows if row.median_us is not None]
        return f"{median(times):.0f} us" if times else "failed"
    if mode not in TIMED_MODES:
        return f"{len(rows) - failed}/{len(rows)} correct"
    ratios = [row.ratio_to_floor for row in rows if row.ratio_to_floor is not None]
    text = f"{median(ratios):.1f}x" if ratios else "-"
    return f"{text}, {failed} failed" if failed and ratios else "failed" if failed else text


def _fastest(rows: Iterable[Row]) -> str:
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.label, row.dtype
        if row.median_us is not None and (key not in best or row.median_us < (best[key].median_us or 0)):
            best[key] = row
    if not best:
        return "-"
    name, wins = Counter(row.backend for row in best.values()).most_common(1)[0]
    return f"{name} {wins}/{len(best)}"


def failures(document: Document) -> list[str]:
    """One line per operation, backend and error, with the number of rows it met."""
    counts = Counter((row.op, row.backend, row.error) for row in document.rows if row.error is not None)
    return [f"{op}, {backend}: {error} ({count} rows)" for (op, backend, error), count in counts.items()]


def ceilings_line(document: Document) -> str:
    """Line with the device and its measured limits."""
    reached = document.ceilings
    node = "" if reached.graph_node_us is None else f", graph node {reached.graph_node_us:.2f} us"
    return (
        f"{document.device}: copy {reached.copy_gb_s:,.0f} GB/s, {reached.matmul_dtype} matrix product "
        f"{reached.matmul_tflop_s:,.2f} TFLOP/s, launch {reached.launch_us:.2f} us{node}"
    )
