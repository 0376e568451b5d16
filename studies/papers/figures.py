"""The study's two figures: speedups that the papers' cost models predict, against those that they print."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, styled, svg
from studies.papers.edd import SIZES, drafted, fit_overhead
from studies.papers.eesd_cost import fit, groups, predicted
from studies.papers.eesd_runs import run
from studies.papers.record import Finding
from studies.papers.tables import read_table

Point = tuple[float, float]  # printed and predicted speedup


@styled()
def eesd(found: dict[str, Finding]) -> str:
    """Eq. 14 with one T_d / T_t per target and method, fitted on the other data sets, and with table 8's."""
    left_out = [
        (one.speedup, predicted(fit([other for other in group if other is not one]), one))
        for group in groups().values()
        for one in group
    ]
    measured = []
    for row in read_table("eesd_8").rows:
        one = run("xsum", row["target"], row["method"])
        short = "beta_ts" if "Beta" in one.method else "cali_ts"
        size = "70b" if one.size == "70B" else "13b"
        measured.append((one.speedup, found[f"eesd.breakdown.llama_2_{size}.{short}.eq14"].value))
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.subplots()
    _points(axes, left_out, PREDICTED, "o", "one ratio per target and method, from other data sets")
    _points(axes, measured, MEASURED, "D", "the ratio that table 8 measures")
    _diagonal(axes, [*left_out, *measured])
    figure.legend(loc="outside upper left", fontsize=8.5)
    return svg(figure, "eesd", "EESD: speedups by Eq. 14 against those printed")


@styled()
def edd() -> str:
    """The cost model of EDD and PCT without overhead, and with one a round and size."""
    without = [(one.row.number("speedup"), one.speedup()) for one in drafted()]
    overheads = {size: fit_overhead([one for one in drafted() if one.size == size]) for size in SIZES}
    with_it = [(one.row.number("speedup"), one.speedup(overheads[one.size])) for one in drafted()]
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.subplots()
    _points(axes, without, MEASURED, "D", "draft and target passes alone")
    told = " and ".join(f"{ms:.1f} ms at {size}" for size, ms in overheads.items())
    _points(axes, with_it, ADAPTIVE, "o", f"and an overhead a round, {told}")
    _diagonal(axes, [*without, *with_it])
    figure.legend(loc="outside upper left", fontsize=8.5)
    return svg(figure, "edd", "EDD and PCT: speedups by tau and costs against those printed")


def _points(axes: Axes, points: Sequence[Point], color: str, marker: str, label: str) -> None:
    axes.plot(*zip(*points, strict=True), marker, color=color, markersize=5, label=label, **DOT)


def _diagonal(axes: Axes, points: Sequence[Point]) -> None:
    """Where prediction is what is printed, and names of the axes."""
    ends = [min(min(point) for point in points), max(max(point) for point in points)]
    axes.plot(ends, ends, color=MUTED, linewidth=1, zorder=0)
    axes.set_xlabel("printed speedup")
    axes.set_ylabel("predicted speedup")
