"""Write section F of docs/errata.md from the findings of the audit: `python -m studies.papers.errata`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specsim.io.files import write_text
from studies.papers.audit import findings
from studies.papers.record import Finding
from studies.report import markdown_table

ERRATA = Path(__file__).parents[2] / "docs" / "errata.md"
START, END = "<!-- findings -->\n", "<!-- end of findings -->\n"
USE = {  # which figure to use
    "F1": "1.41, from times and rates",
    "F2": "1.21, from times and rates",
    "F3": "v_d 0.50 and r_d 0.83; the printed pair is that of the row below, swapped",
    "F4": "ratios of times",
    "F5": "neither without doubt",
    "F6": "either",
    "F7": "r_d is too high, 0.88 is expected",
    "F8": "v_d or r_d is doubtful",
    "F9": "doubtful",
    "F10": "an effective ratio that includes overheads",
    "F11": "acceptance falls with depth; i.i.d. is too optimistic there",
    "F12": "760M; 761M is right for CodeLLaMA alone, whose vocabulary is larger",
    "F13": "tau",
    "F14": "a draft model without the prompt must have cost less than the stated 1.1 ms",
    "F15": "the table",
    "F16": "the baseline was slower than a step of SPACE",
    "F17": "one is a copy; by the greedy figures 13B's is probably right",
    "F18": "the categories; overall is a mean of something else",
    "F19": "the table's sum",
    "F20": "the table",
    "F21": "2.83 as quoted",
    "F22": "the tables",
    "F23": "5.7B; truncated, not rounded",
}


def section(findings: Iterable[Finding]) -> str:
    """Table of the findings that do not support the paper, by erratum and cell."""
    cells: dict[tuple[int, str], list[str]] = {}
    for finding in findings:
        if finding.erratum.startswith("F") and finding.verdict != "supports":
            texts = cells.setdefault((int(finding.erratum[1:]), finding.tables[0]), [])
            text = finding.text
            if not _states_figure(finding):
                text = f"{finding.value:.4g} {finding.unit}".rstrip() + f": {text}"
            texts += [] if text in texts else [text]
    rows = [
        [f"F{number}", cell, "; ".join(texts), USE[f"F{number}"]] for (number, cell), texts in sorted(cells.items())
    ]
    return "\n".join(markdown_table(["case", "table: row: column", "finding", "use"], rows))


def _states_figure(finding: Finding) -> bool:
    """Whether the sentence states the figure."""
    value = finding.value
    return any(text in finding.text for text in (f"{value:.3f}", f"{value:.2f}", f"{value:.1f} %", f"{value:.0f},"))


def with_section(document: str, table: str) -> str:
    """Document with this table between its markers."""
    before, _, rest = document.partition(START)
    return f"{before}{START}{table}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    write_text(ERRATA, with_section(ERRATA.read_text(encoding="utf-8"), section(findings())))
