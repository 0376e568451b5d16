"""Report on the consistency of the five papers' tables: `python -m studies papers`.

Runs no model: the figures are in data/findings.json, the printed tables beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specsim.report.drawing import ADAPTIVE, DOT, MEASURED, MUTED, PREDICTED, styled, svg
from specsim.report.table import Column
from studies.common import Config
from studies.papers.findings import VERDICTS, audit, filled
from studies.papers.tables import PAPERS, read_table, table_names
from studies.report import Report

Series = tuple[str, str, str, str]  # key of the predictions, color, marker, label

ANSWER = (
    "With one cost ratio per target and method, EESD's Eq. 14 reproduces its printed speedups with a mean error of "
    "{eesd.eq14_one_ratio_error:.2f} % ({eesd.eq14_left_out_error:.2f} % on held-out data sets), but with the ratio "
    "that its table 8 measures it overestimates them by {eesd.eq14_measured_error:low:.0f} to "
    "{eesd.eq14_measured_error:high:.0f} %."
)
OVERHEADS = (
    "and an overhead a round, {edd.one_overhead.7b.all.overhead_ms:.1f} ms at 7B and "
    "{edd.one_overhead.13b.all.overhead_ms:.1f} ms at 13B"
)
RECORDED = ()  # no real run


def main(out: Path, config: Config) -> None:
    """Write the report."""
    report().write(out)


def report() -> Report:
    """Return the report."""
    papers = [paper_row(paper) for paper in PAPERS]
    counts = {verdict: sum(row[verdict] for row in papers) for verdict in VERDICTS}
    return Report(
        question="Are the papers' numbers consistent?",
        answer=f"Of {sum(counts.values())} figures recomputed from printed ones {counts['supports']} support the paper "
        f"and {counts['contradicts']} contradict it. {filled(ANSWER)}",
        figure=speedups_figure(),
        figure_name="speedups",
        caption="Speedups that the papers' cost models predict against those printed",
        columns=[
            Column("paper", "paper"),
            Column("figures printed", "printed_figures"),
            Column("figures recomputed", "recomputed"),
            *(Column(verdict, verdict) for verdict in VERDICTS),
        ],
        shown=papers,
        table=[
            {"series": series["series"], "findings": sum(series[verdict] for verdict in VERDICTS), **series}
            for series in audit().series
        ],
        trust=[
            "Every figure has the interval that the rounding of the printed cells allows; a figure contradicts the "
            "paper only where that interval misses what is printed. No model is run, so there are no prompts, no "
            "machine, no load and no noise floor.",
            "Figures were checked against an independent script. Simulated figures carry 95 % intervals.",
            "Section F of docs/errata.md names the cells that disagree and says which figure to use.",
        ],
    )


def paper_row(paper: str) -> dict[str, str | int]:
    """Return a paper's number of printed figures, and of recomputed ones, all and by verdict."""
    cells = [
        row[column]
        for table in map(read_table, table_names())
        if table.paper == paper
        for row in table.rows
        for column in table.units
    ]
    series = [series for series in audit().series if series["series"].startswith(f"{paper}.")]
    verdicts = {verdict: sum(each[verdict] for each in series) for verdict in VERDICTS}
    return {
        "paper": PAPERS[paper],
        "printed_figures": sum(cell[:1].isdigit() or cell[:1] in "+-" for cell in cells if cell),
        "recomputed": sum(verdicts.values()),
        **verdicts,
    }


@styled()
def speedups_figure() -> str:
    """Draw predicted against printed speedups: EESD's Eq. 14, and the cost model of EDD and PCT."""
    figure = Figure(figsize=(10.4, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _scatter(
        left,
        "EESD, Eq. 14",
        ("eq14_left_out", PREDICTED, "o", "one ratio per target and method, from other data sets"),
        ("eq14_measured", MEASURED, "D", "the ratio that table 8 measures"),
    )
    _scatter(
        right,
        "EDD and PCT",
        ("edd_passes", MEASURED, "D", "draft and target passes alone"),
        ("edd_overhead", ADAPTIVE, "o", filled(OVERHEADS)),
    )
    return svg(figure, "speedups", "Predicted speedups against those printed")


def points(model: str) -> Sequence[tuple[float, float]]:
    """Return the printed and the predicted speedup of each row that this cost model was applied to."""
    rows = {row.place(): row for table in map(read_table, table_names()) for row in table.rows}
    predictions = audit().predictions[model]
    return [(rows[place].number("speedup"), predicted) for place, predicted in predictions.items()]


def _scatter(axes: Axes, title: str, *series: Series) -> None:
    """Draw points beside the diagonal on which the prediction is the printed speedup."""
    for model, color, marker, label in series:
        axes.plot(*zip(*points(model), strict=True), marker, color=color, markersize=5, label=label, **DOT)
    values = [value for model, *_ in series for point in points(model) for value in point]
    ends = [min(values), max(values)]
    axes.plot(ends, ends, color=MUTED, linewidth=1, zorder=0)
    axes.set_title(title)
    axes.set_xlabel("printed speedup")
    axes.set_ylabel("predicted speedup")
    axes.legend(fontsize=8.5)
