"""What the studies' reports print is what their claims expect, figure by figure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specsim.claims.check import check
from specsim.claims.files import read_claims
from studies import claims
from studies.printed import figures_of

REPORT = """# Study

## greedy

| drafter | policy | measured | gain % | accepted: mean, spread |
|---|---|---|---|---|
| eagle | `fixed_k(k=5)` | 1.234 [1.100, 1,350.5] | -0.50, met | 0.5, 0.16 |
| edd | fixed_k(k=7) |  | at none tried | 3 of 4 |

### cheap

| speedup of | measured | rule | other | rule |
|---|---|---|---|---|
| eagle, fixed_k | 1.2 | 3 | K=4 | 5 |
"""


def test_every_number_of_a_table_is_a_figure_with_a_name(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text(REPORT)
    found = figures_of(tmp_path / "report.md")
    assert {name: (one.value, one.tolerance, one.interval) for name, one in found.items()} == {
        "greedy: eagle, fixed_k(k=5): measured": (1.234, 0.0005, [1.1, 1350.5]),
        "greedy: eagle, fixed_k(k=5): gain %": (-0.5, 0.005, None),
        "greedy: eagle, fixed_k(k=5): accepted: mean, spread, number 1": (0.5, 0.05, None),
        "greedy: eagle, fixed_k(k=5): accepted: mean, spread, number 2": (0.16, 0.005, None),
        "greedy: edd, fixed_k(k=7): accepted: mean, spread, number 1": (3, 0.5, None),
        "greedy: edd, fixed_k(k=7): accepted: mean, spread, number 2": (4, 0.5, None),
        "greedy / cheap: speedup of eagle, fixed_k: measured": (1.2, 0.05, None),
        "greedy / cheap: speedup of eagle, fixed_k: rule, measured": (3, 0.5, None),
        "greedy / cheap: speedup of eagle, fixed_k: other": (4, 0.5, None),
        "greedy / cheap: speedup of eagle, fixed_k: rule, other": (5, 0.5, None),
    }


def test_tables_whose_figures_are_called_alike_are_told_apart_by_what_stands_above_them(tmp_path: Path) -> None:
    table = "| variant | tau |\n|---|---|\n| edd | 1.5 |\n"
    other = "| N | tau |\n|---|---|\n| 2 | 1.5 |\n"
    lines = ["# Study", "## greedy", "At low costs:", table, "Tuned:", table, "At high costs:", table, "Tuned:", table]
    lines += ["Swept:", other, "## T08", "At low costs:", table]
    (tmp_path / "report.md").write_text("\n\n".join(lines))
    assert list(figures_of(tmp_path / "report.md")) == [
        "greedy / At low costs: edd: tau",
        "greedy / At low costs / Tuned: edd: tau",
        "greedy / At high costs: edd: tau",
        "greedy / At high costs / Tuned: edd: tau",
        "greedy: N 2: tau",
        "T08: edd: tau",
    ]


def test_two_figures_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("| drafter | measured |\n|---|---|\n| edd | 1 |\n| edd | 2 |\n")
    with pytest.raises(AssertionError, match="two figures are called ': edd: measured'"):
        figures_of(tmp_path / "report.md")


@pytest.mark.parametrize("study", claims.CLAIMED)
def test_claims_expect_what_the_report_prints(study: str) -> None:
    assert list(claims.differing(study)) == []


@pytest.mark.parametrize("study", claims.CLAIMED)
def test_what_was_recorded_gives_every_printed_figure_again(study: str) -> None:
    found = [check(claim) for claim in read_claims(claims.claims_file(study))]
    assert len(found) > 20 and [one.claim.name for one in found if not one.passed] == []


def test_a_figure_changed_by_hand_is_named(tmp_path: Path) -> None:
    name = "greedy: eagle, fixed_k, tuned: k=7: measured"
    report = (claims.HOME / "board" / "report.md").read_text()
    changed = tmp_path / "board" / "report.md"
    changed.parent.mkdir()
    assert report.count("| 2.542 [2.209, 2.959] |") == 1
    changed.write_text(report.replace("2.542 [2.209, 2.959]", "2.542 [2.209, 2.958]"))
    assert list(claims.differing("board", tmp_path)) == [
        f"{name}: printed 2.542 [2.209, 2.958], claimed 2.542 [2.209, 2.959]"
    ]
    changed.write_text(report.replace("fixed_k, tuned: k=7 | 2.529", "fixed_k, tuned: k=8 | 2.529"))
    moved = list(claims.differing("board", tmp_path))
    assert f"{name}: claimed, but not printed" in moved and f"{name.replace('k=7', 'k=8')}: not claimed" in moved


def test_a_recorded_number_changed_by_more_than_its_tolerance_is_named(tmp_path: Path) -> None:
    """The baseline's seconds of one prompt: all that was measured against it moves, and nothing else."""
    study, run = "drafters", tmp_path / "studies" / "drafters" / "recorded" / "greedy"
    shutil.copytree(claims.HOME / study / "recorded" / "greedy", run)
    document = run / "eesd" / "replayed.json"
    text = document.read_text()
    assert text.count("1.3666885460115736") == 1
    document.write_text(text.replace("1.3666885460115736", "2.3666885460115736"))
    file = tmp_path / "claims" / "printed" / "drafters.claims.toml"
    file.parent.mkdir(parents=True)
    shutil.copy(claims.claims_file(study), file)
    found = [check(claim) for claim in read_claims(file) if claim.name.startswith("greedy: eesd")]
    moved = {one.claim.name.rpartition(": ")[2] for one in found if not one.passed}
    assert len(found) > 50 and moved == {"measured", "measured, fixed", "measured, TS", "gain"}
