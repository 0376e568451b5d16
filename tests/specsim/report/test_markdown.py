"""What reports in Markdown share."""

from __future__ import annotations

from specsim.report.markdown import accuracy, ladder_table, markdown_table, trust_table


def test_errors_are_set_against_both_targets() -> None:
    text = accuracy([-2.0, 1.0, 4.0, 2.0, -9.0])
    assert "median 2.00 % (target 3 %: met)" in text  # of absolute values
    assert "90th percentile 7.00 % (target 5 %: missed)" in text  # 4 + 0.6 (9 - 4)


def test_a_table_ends_with_an_empty_line() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]


def test_trust_has_the_noise_floor_both_targets_and_the_regret() -> None:
    document = {
        "null_arm": {"estimate": 1.01, "low": 0.99, "high": 1.03},
        "noise_floor_percent": 3.0,
        "rows": [{"error_percent": error} for error in (-1.0, 2.0, -4.0, 20.0)],
        "best": {"predicted": "fixed_k(k=3)", "loss_percent": 0.75, "resolved": False},
    }
    quiet = {**document, "noise_floor_percent": 0.5, "best": {**document["best"], "resolved": True}}
    lines = trust_table({"greedy": document, "sampled": quiet})
    noisy = "3.00, too noisy to tell policies apart"
    cells = "3.00, met | 15.20, missed | fixed_k(k=3) | 0.75"
    assert lines[2] == f"| greedy | 1.010 [0.990, 1.030] | {noisy} | {cells}, not resolved |"
    assert lines[3] == f"| sampled | 1.010 [0.990, 1.030] | 0.50 | {cells}, resolved |"
    assert "(target 3)" in lines[0] and "(target 5)" in lines[0]


def test_the_ladder_has_every_rung_and_its_median_error() -> None:
    rungs = [(1.5, 1.2, 1.1, 1.0), (None, 1.8, 1.6, 2.0), (2.2, 2.1, 2.0, 2.0)]
    names = ("eq14", "constant", "profile", "measured")
    rows = [("abc"[i], {"ladder": dict(zip(names, values, strict=True))}) for i, values in enumerate(rungs)]
    lines = ladder_table(rows)
    assert lines[2] == "| a | 1.500 | 1.200 | 1.100 | 1.000 |"
    assert lines[3] == "| b |  | 1.800 | 1.600 | 2.000 |"  # Eq. 14 knows no trees
    assert lines[5] == "| median error | 30.00 % | 10.00 % | 10.00 % |  |"
