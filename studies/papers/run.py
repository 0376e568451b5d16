"""Report on the consistency of the five papers' tables: `python -m studies.papers.run [OUT]`.

Runs no model: every figure is a finding of `python -m studies.papers audit`. Writes OUT/figures/ and OUT/report.md.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from specsim.files import write_text
from specsim.report.markdown import markdown_table
from studies.common import Config, run_study
from studies.papers import figures
from studies.papers.audit import findings
from studies.papers.record import VERDICTS, Finding
from studies.papers.tables import PAPERS, read_table, table_names

RECORDED = ()  # no real run
SENTENCES = Path(__file__).parent / "sentences.toml"  # of the report, by paper and verdict
FIELD = re.compile(r"{([\w.]+):(?:(low|high):)?([^}]+)}")


def filled(text: str, findings: Iterable[Finding]) -> str:
    """Text with {name:format} replaced by the figure of a finding, {name:low:format} by an end of its interval."""
    by_name = {finding.name: finding for finding in findings}
    return FIELD.sub(lambda field: format(getattr(by_name[field[1]], field[2] or "value"), field[3]), text)


def counts_table(findings: Sequence[Finding]) -> list[str]:
    """Lines of the table of printed figures and findings, by paper and verdict."""
    rows, tables = [], [read_table(name) for name in table_names()]
    for paper, (title, _) in PAPERS.items():
        verdicts = [finding.verdict for finding in findings if finding.paper == paper]
        cells = [
            row[column] for table in tables if table.paper == paper for row in table.rows for column in table.units
        ]
        numbers = sum(cell[:1].isdigit() or cell[:1] in "+-" for cell in cells if cell)
        rows.append([title, str(numbers), *(str(verdicts.count(verdict)) for verdict in VERDICTS)])
    return markdown_table(["paper", "printed figures", *VERDICTS], rows)


def report_text(findings: Sequence[Finding]) -> str:
    """Return the whole report as Markdown."""
    lines = [
        "# Are the papers' numbers consistent?",
        "",
        f"The audit recomputes {len(findings)} figures from printed ones, each with the interval that their rounding "
        "allows. `python -m studies.papers audit` lists them. Section F of docs/errata.md names the cells that "
        "disagree and says which figure to use.",
        "",
        *counts_table(findings),
    ]
    for paper, paragraphs in tomllib.loads(SENTENCES.read_text(encoding="utf-8")).items():
        lines += [f"## {PAPERS[paper][0]}", ""]
        for verdict, text in paragraphs.items():
            lines += [f"**{verdict.replace('_', ' ').capitalize()}.** {filled(text, findings)}", ""]
        if paper in ("eesd", "edd"):
            lines += [f"![Predicted and printed speedups](figures/{paper}.svg)", ""]
    return "\n".join(lines)


def main(out: Path, config: Config) -> None:
    """Audit the tables and write the report."""
    write_text(out / "figures" / "eesd.svg", figures.eesd({finding.name: finding for finding in findings()}))
    write_text(out / "figures" / "edd.svg", figures.edd())
    write_text(out / "report.md", report_text(findings()))


if __name__ == "__main__":
    run_study(main, __file__)
