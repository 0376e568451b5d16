"""A study's report: the question, the answer, a figure, a short table, and how far to trust them.

The table shows a part of table.csv, which holds every row and column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from realrun.pairs.pair import LAB_DEEP
from specsim.io.files import write_text
from specsim.report.page import comparable_text
from specsim.report.table import Column, as_csv, as_text, plain
from studies.common import Config, about_machine, about_prompts

Row = Mapping[str, Any]

RUNGS = {"eq14": "Eq. 14", "profile": "measured costs"}  # of a row's prediction ladder
DIGITS = 6  # of numbers in table.csv
TENTH = plain(lambda value: f"{value:.1f}")  # a column's numbers
SIGNED = plain(lambda value: f"{value:+.1f}")


@dataclass(frozen=True)
class Report:
    """Contents of a report.

    question : the title, in the field's words
    answer : two sentences of what the data show
    figure : an SVG; figure_name, its file's name without suffix; caption, what it shows
    columns : of the table that is shown, at most seven
    shown : its rows, at most eight
    table : all rows, for table.csv
    trust : prompts, machine, load, noise floor and what limits the answer, a line each
    """

    question: str
    answer: str
    figure: str
    figure_name: str
    caption: str
    columns: Sequence[Column]
    shown: Sequence[Row]
    table: Sequence[Row]
    trust: Sequence[str]

    @property
    def markdown(self) -> str:
        """report.md."""
        lines = [
            f"# {self.question}",
            "",
            self.answer,
            "",
            f"![{self.caption}](figures/{self.figure_name}.svg)",
            "",
            f"*{self.caption}.*",
            "",
            *markdown_table(*as_text(self.columns, self.shown)),
            f"[Full table as CSV](table.csv) ({len(self.table)} rows).",
            "",
            "## How far to trust this",
            "",
            *(f"- {line}" for line in self.trust),
            "",
        ]
        return "\n".join(lines)

    def write(self, out: Path) -> None:
        """Write report.md, table.csv and the figure into a folder."""
        write_text(out / "figures" / f"{self.figure_name}.svg", self.figure)
        write_text(out / "table.csv", csv_text(self.table))
        write_text(out / "report.md", self.markdown)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table and an empty line."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(cells) + " |" for cells in rows), ""]


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV; an estimate fills three columns, numbers have six digits."""
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            interval = isinstance(value, Mapping)
            names |= dict.fromkeys([name, f"{name}_low", f"{name}_high"] if interval else [name])
    return as_csv(list(names), [{name: _rounded(value) for name, value in row.items()} for row in rows])


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(number) for name, number in value.items()}
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value


def trust_lines(config: Config, documents: Mapping[str, Row]) -> list[str]:
    """Return how far real runs can be trusted. documents : validations or leaderboards by name"""
    first = next(iter(documents.values()))
    return [
        f"Prompts: {about_prompts(config, first)}.",
        machine_line(config, first),
        load_line(documents),
        f"Noise floor (A/A test, the baseline run twice): {_by_name(documents, 'noise_floor_percent')} %. Smaller "
        "differences are not significant. Intervals (95 %) are over held-out prompts.",
        *comparable_text([document["baseline"]["ms_per_token"] for document in documents.values()]),
        error_line(documents.values()),
    ]


def machine_line(config: Config, document: Row) -> str:
    """Return where a study ran and what its target is."""
    target = str(config["target"])
    deepened = (
        f" {target} is the lab's target with identity blocks added up to the depth of a large model: it accepts like "
        "the trained model and takes as long as a deep model."
    )
    return f"Machine: {about_machine(document)}.{deepened if target.partition(':')[0] == LAB_DEEP else ''}"


def load_line(documents: Mapping[str, Row]) -> str:
    """Return how busy other processes kept the machine during each run."""
    shares = {name: document["load"]["others_percent"] for name, document in documents.items()}
    if all(share is None for share in shares.values()):
        return "Load: not recorded."
    texts = (f"{'n.a.' if share is None else f'{share:.0f} %'} ({name})" for name, share in shares.items())
    return f"Load: other processes used {', '.join(texts)} of the CPUs' time."


def median_load(runs: Sequence[Row]) -> dict[str, Any]:
    """Return the median load of several runs, in the form that `load_line` prints."""
    shares = [run["load"]["others_percent"] for run in runs]
    return {"load": {"others_percent": None if None in shares else float(np.median(shares))}}


def error_line(documents: Iterable[Row]) -> str:
    """Return the prediction error, in percent, by fidelity of the cost model."""
    rows = [row for document in documents for row in document["rows"]]
    medians = []
    for rung, name in RUNGS.items():
        ladders = [row["ladder"] for row in rows if row["ladder"][rung] is not None]
        errors = [100 * abs(ladder[rung] / ladder["measured"] - 1) for ladder in ladders]
        if errors:
            medians.append(f"{np.median(errors):.1f} % with {name}")
    worst = np.quantile([abs(row["error_percent"]) for row in rows], 0.9)
    return f"Prediction error, median: {', '.join(medians)} (90th percentile {worst:.1f} %)."


def _by_name(documents: Mapping[str, Row], key: str) -> str:
    return ", ".join(f"{name} {document[key]:.1f}" for name, document in documents.items())
