"""The report on the five papers: whether the numbers that they print agree with one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, styled, svg
from specsim.report.table import Column
from studies.papers.edd import SIZES, entries, fit_overhead, of_size
from studies.papers.eesd.cost import groups, left_out_fits, predicted
from studies.papers.eesd.runs import SHORT, find_run
from studies.papers.record import VERDICTS, Finding, filled, slug
from studies.papers.tables import PAPERS, read_table, table_names
from studies.report import Report

Point = tuple[float, float]  # printed and predicted speedup
Series = tuple[Sequence[Point], str, str, str]  # points, color, marker, label

ANSWER = (
    "With one cost ratio per target and method, EESD's Eq. 14 reproduces its printed speedups with a mean error of "
    "{eesd.eq14_one_ratio_error:.2f} % ({eesd.eq14_left_out_error:.2f} % on held-out data sets), but with the ratio "
    "that its table 8 measures it overestimates them by {eesd.eq14_measured_error:low:.0f} to "
    "{eesd.eq14_measured_error:high:.0f} %."
)


def report(findings: Sequence[Finding]) -> Report:
    """Return the report."""
    papers = [paper_row(paper, findings) for paper in PAPERS]
    supporting, contradicting = (sum(row[verdict] for row in papers) for verdict in ("supports", "contradicts"))
    return Report(
        question="Are the papers' numbers consistent?",
        answer=f"Of {len(findings)} figures recomputed from printed ones {supporting} support the paper and "
        f"{contradicting} contradict it. "
        f"{filled(ANSWER, findings)}",
        figure=speedups_figure({finding.name: finding for finding in findings}),
        figure_name="speedups",
        caption="Speedups that the papers' cost models predict against those printed",
        columns=[
            Column("paper", "paper"),
            Column("printed figures", "printed_figures"),
            *(Column(verdict, verdict) for verdict in VERDICTS),
        ],
        shown=papers,
        table=series_rows(findings),
        trust=[
            "Every figure has the interval that the rounding of the printed cells allows; a figure contradicts the "
            "paper only where that interval misses what is printed. No model is run, so there are no prompts, no "
            "machine, no load and no noise floor.",
            "Figures were checked against an independent script. Simulated figures carry 95 % intervals.",
            "`python -m studies.papers audit` lists all figures; section F of docs/errata.md names the cells that "
            "disagree and says which figure to use.",
        ],
    )


def paper_row(paper: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return a paper's number of printed figures, and of findings by verdict."""
    cells = [
        row[column]
        for table in map(read_table, table_names())
        if table.paper == paper
        for row in table.rows
        for column in table.units
    ]
    verdicts = [finding.verdict for finding in findings if finding.paper == paper]
    return {
        "paper": PAPERS[paper][0],
        "printed_figures": sum(cell[:1].isdigit() or cell[:1] in "+-" for cell in cells if cell),
        **{verdict: verdicts.count(verdict) for verdict in VERDICTS},
    }


def series_rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return a row for each series of findings: its values' range, and how many have which verdict."""
    rows = []
    for name in dict.fromkeys(finding.series for finding in findings):
        series = [finding for finding in findings if finding.series == name]
        values = [finding.value for finding in series]
        rows.append(
            {
                "series": name,
                "findings": len(series),
                "least": min(values),
                "largest": max(values),
                "unit": series[0].unit,
                **{verdict: sum(finding.verdict == verdict for finding in series) for verdict in VERDICTS},
                "text": series[0].text if len(series) == 1 else "",
            }
        )
    return rows


@styled()
def speedups_figure(findings: dict[str, Finding]) -> str:
    """Draw predicted against printed speedups: EESD's Eq. 14, and the cost model of EDD and PCT."""
    figure = Figure(figsize=(10.4, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left_out = [
        (run.speedup, predicted(ratio, run)) for group in groups().values() for run, ratio in left_out_fits(group)
    ]
    measured = []
    for row in read_table("eesd_8").rows:
        run = find_run("xsum", row["target"], row["method"])
        measured.append((run.speedup, findings[f"eesd.breakdown.{slug(run.target, SHORT[run.method])}.eq14"].value))
    _scatter(
        left,
        "EESD, Eq. 14",
        (left_out, PREDICTED, "o", "one ratio per target and method, from other data sets"),
        (measured, MEASURED, "D", "the ratio that table 8 measures"),
    )
    overheads = {size: fit_overhead(of_size(size)) for size in SIZES}
    sizes = " and ".join(f"{ms:.1f} ms at {size}" for size, ms in overheads.items())
    _scatter(
        right,
        "EDD and PCT",
        ([(entry.printed, entry.speedup()) for entry in entries()], MEASURED, "D", "draft and target passes alone"),
        (
            [(entry.printed, entry.speedup(overheads[entry.size])) for entry in entries()],
            ADAPTIVE,
            "o",
            f"and an overhead a round, {sizes}",
        ),
    )
    return svg(figure, "speedups", "Predicted speedups against those printed")


def _scatter(axes: Axes, title: str, *series: Series) -> None:
    """Draw points beside the diagonal on which the prediction is the printed speedup."""
    for points, color, marker, label in series:
        axes.plot(*zip(*points, strict=True), marker, color=color, markersize=5, label=label, **DOT)
    values = [value for points, *_ in series for point in points for value in point]
    ends = [min(values), max(values)]
    axes.plot(ends, ends, color=MUTED, linewidth=1, zorder=0)
    axes.set_title(title)
    axes.set_xlabel("printed speedup")
    axes.set_ylabel("predicted speedup")
    axes.legend(fontsize=8.5)
