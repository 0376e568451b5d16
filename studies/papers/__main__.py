"""`python -m studies.papers`: print the tables of five papers, and audit them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli.command import JsonOption
from specsim.cli.console import print_json, print_table, run

if TYPE_CHECKING:
    from studies.papers.record import Finding

papers = typer.Typer(
    help="Print and audit the tables of five papers.\n\n"
    "audit recomputes every figure that follows from others; table prints a table as transcribed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
COLUMNS = 80  # width of the output on every terminal


@papers.command()
def audit(
    paper: Annotated[
        str | None,
        typer.Option(help="List all findings of one paper: eesd, edd, space, adaedl, medusa.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check whether the papers' tables agree with one another.

    A finding is a figure recomputed from printed figures, with the interval that their rounding allows
    and a verdict: the paper's own figures support it, contradict it, or cannot decide. Without
    --paper a series over rows is a line, followed by its findings that contradict the paper.

    Exits with 1 if a verdict differs from the recorded one. docs/errata.md explains the errata.

    Example: python -m studies.papers audit --paper medusa
    """
    from studies.papers.audit import changed_verdicts, findings, findings_of
    from studies.papers.tables import PAPERS

    audited = findings() if paper is None else findings_of(paper)
    changed = changed_verdicts(audited)
    if json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in audited], "changed_verdicts": changed})
    else:
        for name, group in groupby(audited, key=lambda finding: finding.paper):
            of_paper = list(group)
            title, arxiv = PAPERS[name]
            rows = _overview(of_paper) if paper is None else [_row(finding) for finding in of_paper]
            _print(f"{title}{f', arXiv:{arxiv}' if arxiv else ''}\n{_counts(of_paper)}", rows)
        for line in changed:
            print(f"verdict changed: {line}")
    if changed:
        raise typer.Exit(1)


@papers.command()
def table(
    name: Annotated[
        str,
        typer.Argument(
            help="Table, such as eesd_10, edd_costs or adaedl_1; any other word lists them.", metavar="NAME"
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Print a table of a paper as it was transcribed, its digits as printed.

    Example: python -m studies.papers table medusa_1
    """
    from studies.papers.tables import PAPERS, read_table

    table = read_table(name)
    title, arxiv = PAPERS[table.paper]
    if json:
        about = {"name": table.name, "paper": title, "arxiv": arxiv, "place": table.place, "caption": table.caption}
        print_json({**about, "keys": table.keys, "units": table.units, "rows": table.lines})
        return
    headings = [f"{column}, {unit}" if (unit := table.units.get(column)) else column for column in table.columns]
    cells = [[row[column] for column in table.columns] for row in table.rows]
    print_table(f"{title}, {table.place}: {table.caption}", headings, cells)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def _row(finding: Finding) -> list[str]:
    """Name and sentence, figure and interval, verdict."""
    name = finding.name.partition(".")[2]
    erratum = f" ({finding.erratum})" if finding.erratum else ""
    figure = f"{_number(finding.value)} {finding.unit}".rstrip()
    if finding.low is not None and finding.high is not None:
        figure += f"\n[{_number(finding.low)}, {_number(finding.high)}]"
    return [f"{name}\n  {finding.text}{erratum}", figure, finding.verdict]


def _overview(findings: Iterable[Finding]) -> list[list[str]]:
    """Rows of single findings, and of each series: its counts, then its findings that contradict the paper."""
    rows: list[list[str]] = []
    series: dict[str, list[Finding]] = {}
    for finding in findings:
        series.setdefault(finding.series, []).append(finding)
    for name, members in series.items():
        if members[0].name == name:
            rows.append(_row(members[0]))
            continue
        values = [finding.value for finding in members]
        span = f"{_number(min(values))} to {_number(max(values))}"
        rows.append([f"{name.partition('.')[2]}.*\n  {_counts(members)}", span, ""])
        rows += [_row(finding) for finding in members if finding.verdict == "contradicts"]
    return rows


def _counts(findings: Sequence[Finding]) -> str:
    """Number of findings by verdict."""
    verdicts: list[str] = [finding.verdict for finding in findings]
    words = {"supports": "support", "contradicts": "contradict", "cannot decide": "cannot decide"}
    counts = [f"{count} {word}" for verdict, word in words.items() if (count := verdicts.count(verdict))]
    return f"{len(findings)} findings: {', '.join(counts)}"


def _print(title: str, rows: Iterable[Sequence[str]]) -> None:
    """Print findings as a table of the same width on every terminal."""
    from rich.table import Table
    from rich.text import Text

    from specsim.report.terminal import terminal

    table = Table(title=Text(title), title_justify="left", width=COLUMNS)
    table.add_column("finding", overflow="fold", ratio=1)
    table.add_column("figure", justify="right", min_width=16, max_width=20)
    table.add_column("verdict", min_width=11)
    for row in rows:
        table.add_row(*map(Text, row))
    terminal(COLUMNS).print(table)


def main() -> None:
    """Entry point of the command."""
    run(papers)


if __name__ == "__main__":
    main()
