"""Where speculation pays on mixtures of experts: tables by hand, and the recorded figures against the package's."""

from __future__ import annotations

from typing import Any

import pytest

from studies.roofline import experts

ROW = {"model": "mixtral-8x7b", "routing": "balanced", "token_s": 0.010, "draft_s": 0.00375}
DOCUMENT: dict[str, Any] = {
    "tables": "vllm 0.24.0", "hardware": "h200", "drafter": "eagle", "drafted": 3, "context": 1024,
    "layer": {"model": "mixtral-8x7b", "hardware": "h200", "seconds": {"1": 1e-4, "4": 3e-4, "16": 6e-4}},
    "rows": [
        {**ROW, "batch": 1, "verify_s": {"once": 0.015, "separate": 0.037}},
        {**ROW, "batch": 2, "verify_s": {"once": 0.006, "separate": 0.006}},
        {**ROW, "model": "llama-2-7b", "batch": 1, "verify_s": {"once": 0.015, "separate": 0.015}},
    ],
}  # fmt: skip


def test_the_least_acceptance_gives_as_many_tokens_as_a_round_costs() -> None:
    assert experts.least_acceptance(1 + 0.5 + 0.25 + 0.125, 3) == pytest.approx(0.5)
    assert experts.least_acceptance(4.0, 3) == pytest.approx(1.0)
    assert experts.least_acceptance(0.9, 3) == 0.0
    assert experts.least_acceptance(4.01, 3) is None


def test_tables_are_those_worked_out_by_hand() -> None:
    """1.5 to 3.7 tokens for verification; with drafting 1.875, which a chance of a half pays, to 4.075, which none."""
    verify = [*experts.table_rows(DOCUMENT, drafting=False)]
    assert verify == [["mixtral-8x7b, balanced", "1.50 to 3.70", "0.60"], ["llama-2-7b, dense", "1.50"]]
    pays = [*experts.table_rows(DOCUMENT, drafting=True)]
    assert pays == [["mixtral-8x7b, balanced", "0.50 to never", "0.00"], ["llama-2-7b, dense", "0.50"]]
    text = "\n".join(experts.section(DOCUMENT))
    assert "3.00 at batch 1, 2.00 at batch 4." in text


def test_experts_cost_most_between_a_few_tokens_and_all_experts() -> None:
    """Of the recorded figures: three drafts cost 2.5 times a layer at batch 1, and nearly nothing more at 16."""
    document = experts.read()
    seconds = {int(n): s for n, s in document["layer"]["seconds"].items()}
    assert seconds[4] / seconds[1] == pytest.approx(2.5, abs=0.05)
    assert seconds[64] / seconds[16] < 1.05
    at = {row["batch"]: experts.costs(row, drafting=False)[0] for row in document["rows"]
          if (row["model"], row["routing"]) == ("qwen3-30b-a3b", "balanced")}  # fmt: skip
    assert at[4] > at[2] > at[1] > 1.5 and at[16] < 1.1


def test_the_recorded_figures_are_the_packages() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra [silicon] is not installed")
    again, recorded = experts.measure(), experts.read()
    assert again["tables"] == recorded["tables"]
    assert again["layer"]["seconds"] == pytest.approx(recorded["layer"]["seconds"])
    for one, other in zip(again["rows"], recorded["rows"], strict=True):
        assert one["verify_s"] == pytest.approx(other["verify_s"])
        assert (one["token_s"], one["draft_s"]) == pytest.approx((other["token_s"], other["draft_s"]))
