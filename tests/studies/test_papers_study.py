"""The report of the papers' study and section F of the errata are written from the findings of the audit."""

from __future__ import annotations

import re

from studies.papers import errata
from studies.papers.audit import findings
from studies.papers.record import VERDICTS
from studies.papers.report import report


def test_the_report_counts_the_findings() -> None:
    written = report(findings())
    assert sum(row[verdict] for row in written.shown for verdict in VERDICTS) == len(findings())
    assert sum(row["findings"] for row in written.table) == len(findings())
    assert "a mean error of 1.75 % (2.97 % on held-out data sets)" in written.answer
    for legend in ("the ratio that table 8 measures", "4.9 ms at 7B and 7.2 ms at 13B"):
        assert legend in written.figure


def test_section_f_of_the_errata_is_written_from_the_findings() -> None:
    document = errata.ERRATA.read_text()
    assert errata.with_section(document, errata.section(findings())) == document
    listed = re.findall(r"^\| (F\d+) \|", document, re.MULTILINE)
    assert set(listed) == set(errata.USE) and listed == sorted(listed, key=lambda case: int(case[1:]))
    assert "| eesd_11: Vicuna-13B, Medusa, self: speedup | times give 1.248, printed 1.21" in document


def test_every_erratum_of_a_finding_is_in_the_errata() -> None:
    document = errata.ERRATA.read_text()
    cases = set(re.findall(r"^\| ([A-F]\d+)\b", document, re.MULTILINE))
    assert {finding.erratum for finding in findings()} - cases == {""}
    expected = {"A": 18, "B": 13, "C": 15, "D": 11, "E": 12, "F": 23}
    assert {letter: sum(case[0] == letter for case in cases) for letter in expected} == expected
