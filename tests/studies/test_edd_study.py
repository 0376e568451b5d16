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
        "train_speedup": predicted, "sequence_tokens": [12, 8],
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
    return {"rows": rows, "drafter_kind": kind, "autoregressive_sequence_seconds": [3.0, 2.0]}


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
    lines = cells(tables.trees_table(document(), pd.concat(parts)))
    assert [line[:2] for line in lines] == [["best chain", labels[0]], ["EAGLE-2", labels[1]], ["PCT", labels[2]]]
    assert [line[3:5] for line in lines] == [["15.0", "2.0"], ["30.0", "4.0"], ["45.0", "6.0"]]


def test_differences_to_pct_are_of_each_policys_best_form() -> None:
    rows = [board_row("pct", "pct, tuned", 1.5), board_row("pct", "pct, plain", 1.2), board_row("eagle2", "e", 1.25)]
    lines = {line[0]: line for line in cells(tables.paper_cost_table({"rows": rows, "baseline_s": [3.0, 2.0]}))}
    assert lines["PCT"][1] == "pct, tuned" and lines["PCT"][6] == ""
    assert lines["EAGLE-2"][6].startswith("-0.250 ") and lines["EAGLE-2"][6].endswith("worse")
    assert lines["EAGLE-2"][4] == "25.0"  # % of rounds truncated


def test_trees_too_large_for_one_price_are_left_out() -> None:
    full = {**board_row("vct", "vct, full", 2.9), "mean_draft_tokens": 311.4}
    assert tables.top({"rows": [full, board_row("vct", "vct, capped", 1.4)]}, "vct")["label"] == "vct, capped"
    assert tables.top({"rows": [full]}, "vct") is None
    assert tables.too_large({"rows": [full, board_row("vct", "v", 1.4)]}) == "vct, full (311 nodes, 2.90)"


def test_the_best_form_is_chosen_on_the_tuning_prompts() -> None:
    lucky = {**board_row("pct", "pct, plain", 1.9), "train_speedup": 1.0}
    assert tables.top({"rows": [lucky, board_row("pct", "pct, tuned", 1.5)]}, "pct")["label"] == "pct, tuned"
    whole = document()
    whole["rows"][0]["train_speedup"] = 0.5
    assert tables.best(whole, "fixed_k")["label"] == "fixed_k(k=4)"


def test_the_order_found_is_set_against_the_papers() -> None:
    def order(values: dict[str, float], apart: float = 0.05) -> str:
        def told(a: str, b: str) -> bool:
            return abs(values[a] - values[b]) > apart

        return str(tables.order_of(values, tables.PAPER_TREES, tables.TREES, told, "Likely: this."))

    assert order({"vct": 1.0, "cape": 1.1, "eagle2": 1.2, "pct": 1.3}).endswith("PCT (1.30); as in the paper.")
    assert order({"vct": 1.0, "eagle2": 1.2, "pct": 1.3}).endswith("as in the paper.")  # of those that were run
    assert order({"vct": 1.0, "cape": 1.1, "eagle2": 1.4, "pct": 1.3}) == (
        "VCT (1.00) < CAPE (1.10) < PCT (1.30) < EAGLE-2 (1.40); the paper has VCT < CAPE < EAGLE-2 < PCT; "
        "significantly different (95 %): PCT below EAGLE-2. Likely: this."
    )
    assert order({"vct": 1.0, "cape": 1.1, "eagle2": 1.4, "pct": 1.3}, apart=0.15) == (
        "VCT (1.00) ~ CAPE (1.10) < PCT (1.30) ~ EAGLE-2 (1.40); the paper has VCT < CAPE < EAGLE-2 < PCT, and no two "
        "that stand the other way differ significantly (95 %)."
    )


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


def test_the_ablation_takes_the_untuned_pct_with_its_leaves() -> None:
    board = {
        "rows": [
            board_row("pct", "pct, tuned", 1.6, leaf_threshold=0.01),
            board_row("pct", "pct, plain", 1.4, leaf_threshold=0.01),
            board_row("pct", "pct, leaves kept", 1.3, leaf_threshold=0.0),
            board_row("fixed_k", "fixed_k, the paper's", 1.2, "k=5", k=5),
        ]
    }
    assert tables.untuned(board, "pct", 0.01)["label"] == "pct, plain"
    assert tables.untuned(board, "pct", 0.0)["label"] == "pct, leaves kept"
    assert tables.form(board, "fixed_k", "k=5")["speedup"]["estimate"] == 1.2


def test_what_was_really_run_is_compared_pair_by_pair() -> None:
    gain = tables.compared(document(), ["pct"], ["eagle2"])
    assert gain.difference.estimate == pytest.approx(0.05)
    assert tables.compared(document(), ["fixed_k", "max_confidence"], ["pct"]).difference.estimate == pytest.approx(
        0.25
    )


def test_the_ablation_is_set_against_the_whole() -> None:
    rows = {"EDD + PCT": board_row("pct", "pct, plain", 1.5), "without states": board_row("pct", "pct, plain", 1.2)}
    lines = cells(tables.ablation_table(rows, {"baseline_s": [3.0, 2.0]}))
    assert [line[0] for line in lines] == list(rows) and [line[6] for line in lines] == ["3.04", "2.58"]
    assert lines[0][5] == "" and lines[1][5].startswith("-0.300 ")


def test_the_sweep_is_set_against_the_usual_layer() -> None:
    rows = {n: {"PCT": board_row("pct", "pct, plain", 1.0 + n / 10)} for n in (1, 5, 8)}
    lines = cells(tables.sweep_table(rows, 5, {"baseline_s": [3.0, 2.0]}))
    assert [line[0] for line in lines] == ["1", "5", "8"]
    assert [line[3][:7] for line in lines] == ["-0.400 ", "", "+0.300 "]


def test_space_shows_every_k_with_what_it_feeds(space: ModuleType) -> None:
    rows = [row("space_k", f"space_k(k={k})", 1.0 + 0.1 * k, 1.0, k=k) for k in (2, 1)]
    free = {1: spread(1.5), 2: spread(1.9)}
    whole = {"rows": [*rows, row("beta_ts", "beta_ts()", 1.0, 1.0)]}
    rounds = pd.DataFrame({"policy": ["beta_ts()", "beta_ts()", "space_k(k=1)"], "drafted": [0, 1, 9]})
    lines = cells(space.k_table(whole, rounds, free))
    assert [line[0] for line in lines] == ["space_k(k=1)", "space_k(k=2)", "beta_ts()"]
    assert [line[3] for line in lines] == ["4", "9", "4.5"]  # 1 + k (k + 2); 2 masks below each of 1.5 in the mean
    assert [line[7][:5] for line in lines] == ["1.500", "1.900", ""]


def test_space_names_every_k_that_is_as_fast_as_the_fastest(space: ModuleType) -> None:
    assert space.fastest({1: 1.0, 2: 1.34, 3: 1.341, 4: 1.2}) == "2, 3"
    rows = [row("space_k", f"space_k(k={k})", 1 / k, 0.9 / k, k=k) | {"measured_tau": 1.3} for k in (1, 5)]
    text = space.findings({"rows": rows}, {1: spread(1.3), 5: spread(1.4)})
    assert text.startswith("Fastest k when really run: 1; were all passes of one price: 5. The paper: 5. On this ")
    assert "takes 7.2 times as long" in text  # 1.3 tokens a pass at 0.18 of the speed
    usual = [row("space_k", "space_k(k=5)", 1.5, 1.5, k=5)]
    assert space.findings({"rows": usual}, {5: spread(1.9)}).endswith("The paper: 5.")


def test_space_compares_held_out_losses(space: ModuleType) -> None:
    def facts(p_ar: float, nats: float) -> dict[str, Any]:
        end = {"original": 2.0, "tuned": nats, "mask_1": 5.0, "mask_1_agreement": 0.25}
        return {"settings": {"p_ar": p_ar}, "held_out": {"end": end}}

    ours, theirs = cells(space.tuning_table(facts(0.5, 1.98), facts(1.0, 1.97)))
    assert ours == ["SAR-SFT", "0.5", "2.0000", "1.9800", "0.250"]
    assert theirs[:4] == ["SFT", "1", "2.0000", "1.9700"]
