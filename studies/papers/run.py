"""What the five papers' tables support, contradict and cannot decide: `python -m studies.papers.run [OUT]`.

Nothing is run: every figure is a finding of `python -m studies.papers audit`. Writes OUT/figures/ and OUT/report.md.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from specsim.files import write_text
from specsim.report.markdown import markdown_table
from studies.common import Config, run_study
from studies.papers import figures
from studies.papers.audit import findings
from studies.papers.record import VERDICTS, Finding
from studies.papers.tables import PAPERS, read_table, table_names

RECORDED = ()  # no real run
SENTENCES = Path(__file__).parent / "sentences.toml"  # by paper what its tables support, contradict, cannot decide
FIELD = re.compile(r"{([\w.]+):(?:(low|high):)?([^}]+)}")


def filled(text: str, found: Iterable[Finding]) -> str:
    """A text with {name:format} as the figure of a finding, {name:low:format} as an end of its interval."""
    by_name = {one.name: one for one in found}
    return FIELD.sub(lambda field: format(getattr(by_name[field[1]], field[2] or "value"), field[3]), text)


def counts_table(found: list[Finding]) -> list[str]:
    """Findings by paper and verdict, and the printed cells that they rest on."""
    rows, tables = [], [read_table(name) for name in table_names()]
    for paper, (title, _) in PAPERS.items():
        verdicts = [one.verdict for one in found if one.paper == paper]
        cells = [
            row[column] for table in tables if table.paper == paper for row in table.rows for column in table.units
        ]
        numbers = sum(cell[:1].isdigit() or cell[:1] in "+-" for cell in cells if cell)
        rows.append([title, str(numbers), *(str(verdicts.count(verdict)) for verdict in VERDICTS)])
    return markdown_table(["paper", "printed figures", *VERDICTS], rows)


def report_text(found: list[Finding]) -> str:
    """The whole report as Markdown."""
    lines = [
        "# What the papers' tables say of themselves",
        "",
        f"{len(found)} figures recomputed from printed ones, each with the interval that their rounding leaves it. "
        "`python -m studies.papers audit` lists them; docs/errata.md names the cells that disagree (section F) and "
        "says what is done about each case.",
        "",
        *counts_table(found),
    ]
    for paper, said in tomllib.loads(SENTENCES.read_text(encoding="utf-8")).items():
        lines += [f"## {PAPERS[paper][0]}", ""]
        for verdict, text in said.items():
            lines += [f"**{verdict.replace('_', ' ').capitalize()}.** {filled(text, found)}", ""]
        if paper in ("eesd", "edd"):
            lines += [f"![Predicted and printed speedups](figures/{paper}.svg)", ""]
    return "\n".join(lines)


def main(out: Path, config: Config) -> None:
    """Audit and write the report."""
    found = list(findings())
    write_text(out / "figures" / "eesd.svg", figures.eesd({one.name: one for one in found}))
    write_text(out / "figures" / "edd.svg", figures.edd())
    write_text(out / "report.md", report_text(found))


if __name__ == "__main__":
    run_study(main, __file__)
