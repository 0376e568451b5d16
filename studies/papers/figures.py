"""The study's two figures: speedups predicted by the papers' cost models against the printed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, styled, svg
from studies.papers.edd import SIZES, entries, fit_overhead, of_size
from studies.papers.eesd.cost import groups, left_out_fits, predicted
from studies.papers.eesd.runs import SHORT, find_run
from studies.papers.record import Finding, slug
from studies.papers.tables import read_table

Point = tuple[float, float]  # printed and predicted speedup
Series = tuple[Sequence[Point], str, str, str]  # points, color, marker, label


@styled()
def eesd(findings: Mapping[str, Finding]) -> str:
    """Draw Eq. 14 with one T_d / T_t per target and method, fitted on the other data sets, and with table 8's."""
    left_out = [
        (run.speedup, predicted(ratio, run)) for group in groups().values() for run, ratio in left_out_fits(group)
    ]
    measured = []
    for row in read_table("eesd_8").rows:
        run = find_run("xsum", row["target"], row["method"])
        measured.append((run.speedup, findings[f"eesd.breakdown.{slug(run.target, SHORT[run.method])}.eq14"].value))
    return _scatter(
        "eesd",
        "EESD: speedups by Eq. 14 against those printed",
        (left_out, PREDICTED, "o", "one ratio per target and method, from other data sets"),
        (measured, MEASURED, "D", "the ratio that table 8 measures"),
    )


@styled()
def edd() -> str:
    """Draw the cost model of EDD and PCT without overhead, and with one overhead per round and size."""
    overheads = {size: fit_overhead(of_size(size)) for size in SIZES}
    without = [(entry.printed, entry.speedup()) for entry in entries()]
    with_overhead = [(entry.printed, entry.speedup(overheads[entry.size])) for entry in entries()]
    sizes = " and ".join(f"{ms:.1f} ms at {size}" for size, ms in overheads.items())
    return _scatter(
        "edd",
        "EDD and PCT: speedups by tau and costs against those printed",
        (without, MEASURED, "D", "draft and target passes alone"),
        (with_overhead, ADAPTIVE, "o", f"and an overhead a round, {sizes}"),
    )


def _scatter(name: str, title: str, *series: Series) -> str:
    """Draw points beside the diagonal on which the prediction is the printed speedup."""
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.subplots()
    for points, color, marker, label in series:
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=5, label=label, **DOT)
    values = [value for points, *_ in series for point in points for value in point]
    ends = [min(values), max(values)]
    axes.plot(ends, ends, color=MUTED, linewidth=1, zorder=0)
    axes.set_xlabel("printed speedup")
    axes.set_ylabel("predicted speedup")
    figure.legend(loc="outside upper left", fontsize=8.5)
    return svg(figure, name, title)
