"""`python -m studies.papers`: the tables of five papers, and an audit of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli.console import print_json, print_table, run
from specsim.cli.options import JsonOption

if TYPE_CHECKING:
    from studies.papers.record import Finding

papers = typer.Typer(
    help="The tables of the five papers as data, and what they say of one another.\n\n"
    "audit recomputes every figure that follows from others; table prints a table as it was transcribed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
NARROW = 80  # columns, on every terminal


@papers.command()
def audit(
    paper: Annotated[
        str | None,
        typer.Option(help="One paper, eesd, edd, space, adaedl or medusa, and all its findings.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Recompute what the papers' tables say of one another, and whether they agree.

    A finding is a figure recomputed from printed ones, with the interval that their rounding leaves
    it, and a verdict: the paper's own figures support it, contradict it, or cannot decide. Without
    --paper a series over rows is one line, and of its findings those that contradict are listed.

    Exits with 1 where a verdict is not the recorded one. docs/errata.md says more of each erratum.

    Example: python -m studies.papers audit --paper medusa
    """
    from studies.papers.audit import changed_verdicts, findings, findings_of
    from studies.papers.tables import PAPERS

    found = findings() if paper is None else findings_of(paper)
    changed = changed_verdicts(found)
    if json:
        print_json({"findings": [dataclasses.asdict(one) for one in found], "changed_verdicts": changed})
    else:
        for name, group in groupby(found, key=lambda one: one.paper):
            of_paper = list(group)
            title, arxiv = PAPERS[name]
            shown = _overview(of_paper) if paper is None else [_line(one) for one in of_paper]
            _print(f"{title}{f', arXiv:{arxiv}' if arxiv else ''}\n{_counts(of_paper)}", shown)
        for line in changed:
            print(f"verdict changed: {line}")
    if changed:
        raise typer.Exit(1)


@papers.command()
def table(
    name: Annotated[
        str, typer.Argument(help="Which, as eesd_10, edd_costs or adaedl_1; any other word lists them.", metavar="NAME")
    ],
    json: JsonOption = False,
) -> None:
    """Print a table of a paper as it was transcribed, its digits as printed.

    Example: python -m studies.papers table medusa_1
    """
    from studies.papers.tables import PAPERS, read_table

    read = read_table(name)
    title, arxiv = PAPERS[read.paper]
    if json:
        about = {"name": read.name, "paper": title, "arxiv": arxiv, "place": read.place, "caption": read.caption}
        print_json({**about, "keys": read.keys, "units": dict(read.units), "rows": [dict(row) for row in read.lines]})
        return
    headings = [f"{column}, {unit}" if (unit := read.units.get(column)) else column for column in read.columns]
    print_table(
        f"{title}, {read.place}: {read.caption}",
        headings,
        [[row[column] for column in read.columns] for row in read.rows],
    )


def figure(value: float) -> str:
    """A number with as many digits as tell it apart."""
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def _line(one: Finding) -> list[str]:
    interval = "" if one.low is None or one.high is None else f"\n[{figure(one.low)}, {figure(one.high)}]"
    name = one.name.partition(".")[2]
    erratum = f" ({one.erratum})" if one.erratum else ""
    return [f"{name}\n  {one.text}{erratum}", f"{figure(one.value)} {one.unit}".rstrip() + interval, one.verdict]


def _overview(found: Sequence[Finding]) -> list[list[str]]:
    """Single findings, a line for every series, and those of a series that contradict."""
    lines: list[list[str]] = []
    series: dict[str, list[Finding]] = {}
    for one in found:
        series.setdefault(one.series, []).append(one)
    for name, members in series.items():
        if members[0].name == name:
            lines.append(_line(members[0]))
            continue
        values = [one.value for one in members]
        span = f"{figure(min(values))} to {figure(max(values))}"
        lines.append([f"{name.partition('.')[2]}.*\n  {_counts(members)}", span, ""])
        lines += [_line(one) for one in members if one.verdict == "contradicts"]
    return lines


def _counts(found: Sequence[Finding]) -> str:
    """How many findings have which verdict."""
    from studies.papers.record import VERDICTS

    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}
    told = {"supports": "support", "contradicts": "contradict", "cannot decide": "cannot decide"}
    return f"{len(found)} findings: " + ", ".join(f"{count} {told[name]}" for name, count in counts.items() if count)


def _print(title: str, rows: Iterable[Sequence[str]]) -> None:
    """A table of findings that no terminal breaks."""
    from rich.table import Table
    from rich.text import Text

    from specsim.report.terminal import terminal

    table = Table(title=Text(title), title_justify="left", width=NARROW)
    table.add_column("finding", overflow="fold", ratio=1)
    table.add_column("figure", justify="right", min_width=16, max_width=20)
    table.add_column("verdict", min_width=11)
    for row in rows:
        table.add_row(*map(Text, row))
    terminal(NARROW).print(table)


def main() -> None:
    """Entry point of the command."""
    run(papers)


if __name__ == "__main__":
    main()
