"""What reports in Markdown share."""

from __future__ import annotations

from specsim.report.markdown import accuracy, markdown_table


def test_errors_are_set_against_both_targets() -> None:
    text = accuracy([-2.0, 1.0, 4.0, 2.0, -9.0])
    assert "median 2.00 % (target 3 %: met)" in text  # of absolute values
    assert "90th percentile 7.00 % (target 5 %: missed)" in text  # 4 + 0.6 (9 - 4)


def test_a_table_ends_with_an_empty_line() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]
