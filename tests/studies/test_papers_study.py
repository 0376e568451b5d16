"""The study of the papers' tables: its report and section F of the errata are what the audit finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specsim.papers import findings
from specsim.papers.tables import PAPERS
from studies.papers import errata
from studies.papers.run import filled, main, report_text
from tests.support import ROOT

HOME = ROOT / "studies" / "papers"


def test_the_report_is_what_the_audit_finds() -> None:
    text = (HOME / "report.md").read_text()
    assert text == report_text(list(findings()))
    assert [title for title, _ in PAPERS.values() if f"## {title}\n" not in text] == []
    for verdict in ("Supports", "Contradicts", "Cannot decide"):
        assert text.count(f"**{verdict}.**") == len(PAPERS)
    assert "1.75 % in the mean, and to 2.97 %" in text and "2.03 (Gsm8k) and 1.94 (XSum)" in text


def test_it_needs_no_real_run(tmp_path: Path) -> None:
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
    assert {one.erratum for one in findings()} - cases == {""}
    expected = {"A": 17, "B": 13, "C": 15, "D": 11, "E": 12, "F": 23}
    assert {letter: sum(case[0] == letter for case in cases) for letter in expected} == expected


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:specsim|realrun|kernels|studies)/[\w./]+)`", errata.ERRATA.read_text())))
)
def test_files_that_the_errata_name_exist(path: str) -> None:
    assert (ROOT / path).exists()


STATED = [  # case, and what it says: {name:format} is a finding's figure
    ("A2", "in {eesd.simulated_invalid.p82.literal:.0f} to {eesd.simulated_invalid.p55.literal:.0f} % of draws"),
    ("A2", "draft {eesd.simulated_drafted.p55.clamped:.2f} to {eesd.simulated_drafted.p82.clamped:.2f} tokens"),
    ("A3", "reaches {eesd.fixed_k.gsm8k.speedup_at_4:.2f} on Gsm8k and {eesd.fixed_k.xsum.speedup_at_4:.2f} on XSum"),
    ("A3", "from {eesd.accept_prob_range:low:.2f} to {eesd.accept_prob_range:high:.2f}"),
    ("A3", "misses by {eesd.length_error.constant:.2f}"),
    ("A4", "{eesd.calibrated_printed.0_3:.3f} after 512 tokens where 0.3 is true"),
    ("A15", "promises {eesd.eq14_measured_error:low:.0f} to {eesd.eq14_measured_error:high:.0f} % too much"),
    ("A15", "to {eesd.eq14_one_ratio_error:.2f} %, data sets left out to {eesd.eq14_left_out_error:.2f} %"),
    ("A17", "imply {eesd.draft_length.self_sd:low:.1f} to {eesd.draft_length.self_sd:high:.1f} drafted tokens"),
    ("B1", "is {edd.accepted_share:low:.2f} to {edd.accepted_share:high:.2f} in table 1"),
    ("B11", "needs {edd.full_tree.llama2_chat_7b.peak_share:.0f} to {edd.full_tree.vicuna1_5_13b.peak_share:.0f} %"),
    (
        "B13",
        "by {edd.no_overhead_error.cape:.0f} to {edd.no_overhead_error.eagle:.0f} % in the mean over a "
        "method, {edd.no_overhead_error.vct:high:.1f} % at most",
    ),
    (
        "B13",
        "{edd.one_overhead.7b.all.overhead_ms:.1f} ms at 7B and "
        "{edd.one_overhead.13b.all.overhead_ms:.1f} ms at 13B, brings the error to "
        "{edd.one_overhead.7b.all.error:.1f} and {edd.one_overhead.13b.all.error:.1f} %",
    ),
    (
        "B13",
        "{edd.one_overhead.7b.pct.overhead_ms:.1f} and {edd.one_overhead.13b.pct.overhead_ms:.1f} ms, "
        "{edd.one_overhead.7b.pct.error:.1f} and {edd.one_overhead.13b.pct.error:.1f} %",
    ),
    ("B13", "{edd.per_node.capped_overhead_ms:.1f} ms a round and {edd.per_node.capped_ms:.3f} ms a node"),
    ("C1", "this gives ({space.rejection.from_target:.1f}, 0.3)"),
    ("C2", "{space.mask_links.k5:.0f} links at k = 5"),
    ("D2", "by {adaedl.threshold_step:.3f} a round, {adaedl.threshold_rounds:.0f} rounds for 0.1"),
    ("D8", "fails in none, the score is above acceptance in {adaedl.score_above_acceptance:.0f} %"),
]


@pytest.mark.parametrize(("case", "text"), STATED)
def test_figures_of_the_errata_are_those_of_the_audit(case: str, text: str) -> None:
    (line,) = re.findall(rf"^\| {case} .*$", errata.ERRATA.read_text(), re.MULTILINE)
    assert filled(text, findings()) in line
