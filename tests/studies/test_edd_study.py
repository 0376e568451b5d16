"""The studies of EDD and SPACE: their tables say what validations and boards say, and name the right rows."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from studies.edd import tables

Row = dict[str, Any]


@pytest.fixture(scope="module")
def space() -> ModuleType:
    pytest.importorskip("torch")
    return importlib.import_module("studies.space.run")


def spread(estimate: float) -> dict[str, float]:
    return {"estimate": estimate, "low": estimate - 0.01, "high": estimate + 0.01}


def row(
    policy: str, label: str, predicted: float, measured: float, role: str = "tuned", **params: Any
) -> dict[str, Any]:
    return {
        "policy": policy, "label": label, "role": role, "params": params, "v_d": 0.5, "tau": 2.0,
        "predicted": spread(predicted), "measured": spread(measured),
        "error_percent": 100 * (predicted / measured - 1), "sequence_seconds": [3 / measured, 2 / measured],
        "train_speedup": predicted, "sequence_tokens": [12, 8], "truncated_share": 0.0,
        "ladder": {"eq14": None, "constant": predicted, "profile": predicted, "measured": measured},
    }  # fmt: skip


def document(kind: str = "edd") -> dict[str, Any]:
    rows = [
        row("fixed_k", "fixed_k(k=2)", 1.3, 1.25, k=2),
        row("fixed_k", "fixed_k(k=5)", 1.1, 1.15, "default", k=5),
        row("fixed_k", "fixed_k(k=4)", 1.2, 1.2, "fixed_k", k=4),
        row("max_confidence", "max_confidence()", 1.25, 1.5),
        row("eagle2", "eagle2(nodes=50)", 0.9, 0.95),
        row("pct", "pct()", 1.0, 1.0),
    ]
    return {
        "rows": rows,
        "drafter_kind": kind,
        "autoregressive_sequence_seconds": [3.0, 2.0],
        "output_tokens": 400,
        "noise_floor_percent": 0.5,
    }


def board_row(policy: str, label: str, speedup: float, settings: str = "", **params: Any) -> dict[str, Any]:
    return {
        "policy": policy, "label": label, "settings": settings, "tuned": label.endswith("tuned"), "params": params,
        "speedup": spread(speedup), "tau": 2.0, "v_d": 0.5, "mean_draft_tokens": 4.0,
        "sequence_seconds": [3 / speedup, 2 / speedup], "train_speedup": speedup, "truncated_share": 0.25,
    }  # fmt: skip


def cells(table: list[str]) -> list[list[str]]:
    """The body of a Markdown table."""
    lines = [line for line in table if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_drafters_stand_at_the_papers_length_and_under_their_best_chain() -> None:
    lines = cells(tables.drafters_table({"edd": document(), "medusa-1": document("medusa")}))
    assert [line[:3] for line in lines] == [
        ["EDD", "fixed_k(k=5)", "0.40"],  # alpha = tau / K
        ["EDD", "fixed_k(k=2)", "1.00"],  # best on the tuning prompts; trees are left out
        ["MEDUSA-1", "fixed_k(k=4)", "0.50"],  # as deep as it has heads
        ["MEDUSA-1", "fixed_k(k=2)", "1.00"],
    ]
    assert lines[0][5].startswith("1.100") and lines[0][6].startswith("1.150") and lines[0][7] == "-4.3"


def test_trees_show_the_nodes_of_their_real_rounds() -> None:
    labels = ("fixed_k(k=2)", "eagle2(nodes=50)", "pct()")
    parts = [
        pd.DataFrame({"policy": label, "drafted": [10 * n, 20 * n], "verified": [n, 3 * n]})
        for n, label in enumerate(labels, start=1)
    ]
    shown = document()
    shown["rows"][-1]["truncated_share"] = 0.125
    lines = cells(tables.trees_table(shown, pd.concat(parts)))
    assert [line[:2] for line in lines] == [["best chain", labels[0]], ["EAGLE-2", labels[1]], ["PCT", labels[2]]]
    assert [line[3:5] for line in lines] == [["15.0", "2.0"], ["30.0", "4.0"], ["45.0", "6.0"]]
    assert [line[5] for line in lines] == ["0.00", "0.00", "12.50"]  # % of rounds truncated


def test_differences_to_pct_are_of_each_policys_best_form() -> None:
    rows = [board_row("pct", "pct, tuned", 1.5), board_row("pct", "pct, plain", 1.2), board_row("eagle2", "e", 1.25)]
    lines = {line[0]: line for line in cells(tables.paper_cost_table({"rows": rows, "baseline_s": [3.0, 2.0]}))}
    assert lines["PCT"][1] == "pct, tuned" and lines["PCT"][6] == ""
    assert lines["EAGLE-2"][6].startswith("-0.250 ") and lines["EAGLE-2"][6].endswith("worse")
    assert lines["EAGLE-2"][4] == "25.00"  # % of rounds truncated


def test_the_best_form_is_chosen_on_the_tuning_prompts() -> None:
    lucky = {**board_row("pct", "pct, plain", 1.9), "train_speedup": 1.0}
    assert tables.top({"rows": [lucky, board_row("pct", "pct, tuned", 1.5)]}, "pct")["label"] == "pct, tuned"
    whole = document()
    whole["rows"][0]["train_speedup"] = 0.5
    assert tables.best(whole, "fixed_k")["label"] == "fixed_k(k=4)"


def test_drafters_are_told_apart_over_what_each_of_them_ran() -> None:
    def run(rounds: list[int]) -> tuple[Row, pd.DataFrame]:
        ids = [n for n, count in enumerate(rounds) for _ in range(count)]
        frame = pd.DataFrame({"policy": ["fixed"] * len(ids), "sequence_id": ids})
        other = pd.DataFrame({"policy": ["other"] * 3, "sequence_id": [0, 0, 1]})
        return {"label": "fixed", "sequence_tokens": [8] * len(rounds)}, pd.concat([frame, other])

    assert tables.acceptance_lengths_apart(run([4, 4, 5, 4]), run([2, 3, 2, 2]))
    assert not tables.acceptance_lengths_apart(run([4, 2, 5, 2]), run([2, 4, 3, 4]))
    a, b = document(), document()
    b["autoregressive_sequence_seconds"] = [6.0, 4.0]  # a slower machine, and its rows as much
    slower = {**b["rows"][0], "sequence_seconds": [2 * x for x in a["rows"][0]["sequence_seconds"]]}
    assert not tables.speedups_apart(a, b, a["rows"][0], slower)
    assert tables.speedups_apart(a, b, a["rows"][0], a["rows"][0])
    noisy = {**b, "noise_floor_percent": 60.0}
    assert not tables.speedups_apart(a, noisy, a["rows"][0], a["rows"][0])  # 1.25 against 2.5


def test_what_was_really_run_is_compared_pair_by_pair() -> None:
    assert tables.compared(document(), ["pct"], ["eagle2"]).startswith("+0.050 ")
    assert tables.compared(document(), ["fixed_k", "max_confidence"], ["pct"]).startswith("+0.250 ")


def test_space_shows_every_k_with_what_it_feeds(space: ModuleType) -> None:
    rows = [row("space_k", f"space_k(k={k})", 1.0 + 0.1 * k, 1.0, k=k) for k in (2, 1)]
    free = {1: spread(1.5), 2: spread(1.9)}
    whole = {"rows": [*rows, row("beta_ts", "beta_ts()", 1.0, 1.0)]}
    rounds = pd.DataFrame({"policy": ["beta_ts()", "beta_ts()", "space_k(k=1)"], "drafted": [0, 1, 9]})
    lines = cells(space.k_table(whole, rounds, free))
    assert [line[0] for line in lines] == ["space_k(k=1)", "space_k(k=2)", "beta_ts()"]
    assert [line[3] for line in lines] == ["4", "9", "4.5"]  # 1 + k (k + 2); 2 masks below each of 1.5 in the mean
    assert [line[7][:5] for line in lines] == ["1.500", "1.900", ""]


def test_space_names_every_k_that_is_not_told_apart_from_the_fastest(space: ModuleType) -> None:
    def found(floor: float, *speedups: float) -> str:
        rows = [row("space_k", f"space_k(k={k})", s, s, k=k) for k, s in enumerate(speedups, start=1)]
        base = {"autoregressive_sequence_seconds": [3.0, 2.0], "output_tokens": 400, "noise_floor_percent": floor}
        return str(space.findings({"rows": rows, **base}, {"rows": rows, **base}))

    text = found(0.5, 1.3, 1.1, 1.0, 0.9, 0.8)
    assert text.startswith("Fastest k when really run: 1; not as in the paper, which has 5. Were all passes of one ")
    assert text.endswith("The k that is best on the tuning prompts, 1, was measured at 1.300 [1.290, 1.310].")
    assert "Likely" not in text
    near = found(2.0, 1.0, 1.1, 1.2, 1.29, 1.3)
    assert near.startswith("Fastest k when really run: 4, 5; not decided whether as in the paper, which has 5.")
    assert found(0.5, 1.0, 1.1, 1.2, 1.25, 1.3).startswith("Fastest k when really run: 5, as in the paper.")
