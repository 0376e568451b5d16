"""What reports in Markdown share."""

from __future__ import annotations

from typing import Any

from specsim.report.markdown import accuracy, ladder_table, markdown_table, trust_table
from specsim.report.page import comparable_text


def test_errors_are_set_against_both_targets() -> None:
    text = accuracy([-2.0, 1.0, 4.0, 2.0, -9.0])
    assert "median 2.00 % (target 3 %: met)" in text  # of absolute values
    assert "90th percentile 7.00 % (target 5 %: missed)" in text  # 4 + 0.6 (9 - 4)


def test_a_table_ends_with_an_empty_line() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]


def measured(token_ms: float, floor_percent: float = 3.0) -> dict[str, Any]:
    return {
        "kind": "specsim-validation",
        "null_arm": {"estimate": 1.01, "low": 0.99, "high": 1.03},
        "noise_floor_percent": floor_percent,
        "load": {"others_percent": 52.4, "stolen_percent": 0.0},
        "autoregressive_sequence_seconds": [token_ms, 2 * token_ms],
        "output_tokens": 3000,
        "rows": [{"error_percent": error} for error in (-1.0, 2.0, -4.0, 20.0)],
    }


def test_trust_has_the_machine_the_noise_floor_and_both_targets() -> None:
    lines = trust_table({"greedy": measured(14.0), "sampled": measured(14.5, 0.5)}, repeats=2)
    noisy = "3.00, too noisy to tell policies apart"
    assert lines[2] == f"| greedy | 52 | 14.00 | 1.010 [0.990, 1.030] | {noisy} | 3.00, met | 15.20, missed |"
    assert lines[3] == "| sampled | 52 | 14.50 | 1.010 [0.990, 1.030] | 0.50 | 3.00, met | 15.20, missed |"
    assert "(target 3)" in lines[0] and "(target 5)" in lines[0]
    text = "\n".join(lines)
    assert "Measured is the fastest of two repeats" in text and "comparable" not in text and "Choice" not in text


def test_runs_whose_baseline_tokens_differ_are_not_comparable() -> None:
    """5 % is the most: 14.0 and 14.7 ms may be compared, 14.0 and 14.8 ms may not."""
    assert comparable_text({"a": measured(14.0), "b": measured(14.7)}) == []
    assert comparable_text({"a": measured(14.0)}) == comparable_text({}) == []
    (line,) = comparable_text({"a": measured(14.0), "b": measured(14.8), "c": measured(38.0)})
    assert "not comparable" in line and "14.0 to 38.0 ms" in line
    assert line in trust_table({"a": measured(14.0), "b": measured(38.0)}, repeats=3)


def test_a_board_of_before_says_what_its_forecast_chose() -> None:
    rows = [
        {"label": "a", "train_speedup": 1.4, "leader_minus_this": None},
        {
            "label": "b",
            "train_speedup": 2.5,
            "leader_minus_this": {"difference": {"estimate": 0.09, "low": -0.1, "high": 0.3}, "separated": False},
        },
    ]
    for row, speedup in zip(rows, (1.6, 1.5), strict=True):
        row |= {"measured": {"estimate": speedup, "low": 1.4, "high": 1.7}, "error_percent": 1.0}
    text = "\n".join(trust_table({"T08": {**measured(14.0), "kind": "specsim-drafter-leaderboard", "rows": rows}}, 3))
    assert "T08: Choice by the forecast made before decoding: b, forecast 2.500, measured 1.500" in text
    assert "the measured best is a; regret of the choice: 0.090 [-0.100, 0.300], not significant" in text


def test_the_ladder_has_every_rung_and_its_median_error() -> None:
    rungs = [(1.5, 1.2, 1.1, 1.0), (None, 1.8, 1.6, 2.0), (2.2, 2.1, 2.0, 2.0)]
    names = ("eq14", "constant", "profile", "measured")
    rows = [("abc"[i], {"ladder": dict(zip(names, values, strict=True))}) for i, values in enumerate(rungs)]
    lines = ladder_table(rows)
    assert lines[2] == "| a | 1.500 | 1.200 | 1.100 | 1.000 |"
    assert lines[3] == "| b |  | 1.800 | 1.600 | 2.000 |"  # Eq. 14 knows no trees
    assert lines[5] == "| median error | 30.00 % | 10.00 % | 10.00 % |  |"
