"""The report of the papers' study and section F of the errata are written from the findings of the audit."""

from __future__ import annotations

import re
from pathlib import Path

from studies.papers import errata
from studies.papers.audit import findings
from studies.papers.run import main, report_text
from studies.papers.tables import PAPERS
from tests.support import ROOT

HOME = ROOT / "studies" / "papers"


def test_the_report_states_the_findings() -> None:
    text = (HOME / "report.md").read_text()
    assert text == report_text(findings())
    assert [title for title, _ in PAPERS.values() if f"## {title}\n" not in text] == []
    for verdict in ("Supports", "Contradicts", "Cannot decide"):
        assert text.count(f"**{verdict}.**") == len(PAPERS)
    assert "a mean error of 1.75 %, and of 2.97 %" in text and "2.03 (Gsm8k) and 1.94 (XSum)" in text


def test_it_runs_no_model(tmp_path: Path) -> None:
    main(tmp_path, {})
    assert (tmp_path / "report.md").read_text() == (HOME / "report.md").read_text()
    for name, legend in (("eesd", "the ratio that table 8 measures"), ("edd", "4.9 ms at 7B and 7.2 ms at 13B")):
        assert legend in (tmp_path / "figures" / f"{name}.svg").read_text()


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
