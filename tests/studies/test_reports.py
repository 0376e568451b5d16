"""Every study's report: written again from what its real run recorded, byte for byte, and short enough to be read."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

from specsim.report.table import SPEEDUP, Column
from studies import __main__ as command
from studies.figures import COLORS, dots, line_panels, speedup_dots
from studies.report import Report, csv_text, error_line, load_line, markdown_table

WRITTEN = ("report.md", "table.csv")
ESTIMATE = {"estimate": 1.23456789, "low": 1.1, "high": 1.5}


@pytest.mark.parametrize("name", command.STUDIES)
def test_a_shipped_report_is_written_again_from_what_was_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    home = tmp_path / "studies" / name
    shutil.copytree(command.HOME / name, home)
    shipped = {file: (home / file).read_text() for file in WRITTEN}
    for file in WRITTEN:
        (home / file).unlink()
    monkeypatch.setattr(command, "HOME", tmp_path / "studies")
    command.main([name], out=tmp_path / "out")
    assert {file: (home / file).read_text() for file in WRITTEN} == shipped


@pytest.mark.parametrize("name", command.STUDIES)
def test_a_report_has_one_figure_one_short_table_and_a_link_to_all_rows(name: str) -> None:
    text = (command.HOME / name / "report.md").read_text()
    assert len(text.split()) < 700
    assert text.startswith("# ") and text.splitlines()[0].endswith("?")
    figures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(figures) == 1 and (command.HOME / name / figures[0]).is_file()
    head, rule, *body = [line for line in text.splitlines() if line.startswith("|")]
    assert len(body) <= 8 and head.count("|") - 1 <= 7 and set(rule) <= {"|", "-"}
    with (command.HOME / name / "table.csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert f"[Full table as CSV](table.csv) ({len(lines)} rows)." in text
    assert (command.HOME / name / "table.csv").stat().st_size < 50_000
    trust = text.partition("## How far to trust this\n")[2]
    assert all(word in trust.lower() for word in ("prompts", "load", "noise floor"))


def test_a_report_shows_part_of_its_table(tmp_path: Path) -> None:
    rows = [{"policy": "a", "speedup": ESTIMATE, "rounds": 12}, {"policy": "b", "speedup": ESTIMATE}]
    report = Report(
        question="Which?",
        answer="a.",
        figure=speedup_dots([("a", {"predicted": ESTIMATE, "measured": ESTIMATE})], "dots", "Speedups"),
        figure_name="dots",
        caption="Speedups",
        columns=[Column("policy", "policy"), Column("speedup", "speedup", SPEEDUP)],
        shown=rows[:1],
        table=rows,
        trust=["Prompts: two."],
    )
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| a | 1.235 [1.100, 1.500] |" in text and "| b |" not in text and "(2 rows)" in text
    assert (tmp_path / "figures" / "dots.svg").read_text().startswith("<svg")
    assert csv_text(rows).splitlines() == [
        "policy,speedup,speedup_low,speedup_high,rounds",
        "a,1.23457,1.1,1.5,12",
        "b,1.23457,1.1,1.5,",
    ]


def test_a_row_has_a_dot_per_estimate_and_only_named_rows_a_label() -> None:
    rows = [(label, {"forecast": ESTIMATE, "text known": ESTIMATE, "own": ESTIMATE}) for label in ("idle", "", "busy")]
    drawn = dots(rows, "n", "title", "error, %", level=0.0)
    assert [drawn.count(f">{text}<") for text in ("forecast", "text known", "own", "idle", "busy")] == [1] * 5
    colors = [drawn.count(f"fill: {color}; stroke: #ffffff") for color in COLORS[:4]]
    assert colors == [len(rows) + 1] * 3 + [0]  # and the legend's


def test_lines_keep_their_color_over_panels() -> None:
    line = ([1.0, 2.0], [ESTIMATE, ESTIMATE])
    drawn = line_panels({"a panel": {"K": line, "tree": line}, "another": {"tree": line}}, ("x", "y"), "n", level=1.0)
    assert drawn.count(">tree<") == 1 and drawn.count(">a panel<") == 1
    assert drawn == line_panels(
        {"a panel": {"K": line, "tree": line}, "another": {"tree": line}}, ("x", "y"), "n", level=1.0
    )


def test_prediction_errors_are_medians_by_fidelity_of_the_costs() -> None:
    rungs = [(1.5, 1.2, 1.1, 1.0), (None, 1.8, 1.6, 2.0), (2.2, 2.1, 2.0, 2.0)]  # Eq. 14 knows no trees
    names = ("eq14", "constant", "profile", "measured")
    rows = [{"ladder": dict(zip(names, values, strict=True)), "error_percent": -9.0} for values in rungs]
    assert error_line([{"rows": rows}]) == (
        "Prediction error, median: 30.0 % with Eq. 14, 10.0 % with constant costs, 10.0 % with measured costs (90th "
        "percentile 9.0 %)."
    )


def test_load_that_was_not_recorded_is_said_so() -> None:
    busy, unknown = ({"load": {"others_percent": share}} for share in (52.4, None))
    assert load_line({"a": busy, "b": unknown}) == "Load: other processes used 52 % (a), n.a. (b) of the CPUs' time."
    assert load_line({"b": unknown}) == "Load: not recorded."


def test_a_table_ends_with_an_empty_line() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]
