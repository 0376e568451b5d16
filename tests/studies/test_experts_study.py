"""When speculation pays on mixtures of experts: rows by hand, and the recorded figures."""

from __future__ import annotations

import json

import pytest

from studies.__main__ import HOME
from studies.experts import report, run

RECORDED = json.loads((HOME / "experts" / "recorded" / run.MEASURED).read_text())
ROW = {"model": "mixtral-8x7b", "routing": "balanced", "token_s": 0.010, "draft_s": 0.00375, "batch": 1}


def test_the_least_acceptance_gives_as_many_tokens_as_a_round_costs() -> None:
    assert report.least_acceptance(1 + 0.5 + 0.25 + 0.125, 3) == pytest.approx(0.5)
    assert report.least_acceptance(4.0, 3) == pytest.approx(1.0)
    assert report.least_acceptance(0.9, 3) == 0.0
    assert report.least_acceptance(4.01, 3) is None


def test_rows_are_those_worked_out_by_hand() -> None:
    """1.5 to 3.7 tokens for verification; with drafting 1.875, which a chance of a half pays, to 4.075, which none."""
    row = report.row_of({**ROW, "verify_s": {"once": 0.015, "separate": 0.037}}, 3)
    assert row["model"] == "mixtral-8x7b, balanced"
    assert [row["verify_cost"][end] for end in ("low", "high")] == pytest.approx([1.5, 3.7])
    assert report.span(row) == "0.50 to never"
    cheap = report.row_of({**ROW, "model": "llama-2-7b", "verify_s": {"once": 0.006, "separate": 0.006}}, 3)
    assert cheap["model"] == "llama-2-7b, dense" and report.span(cheap) == "0.00"


def test_experts_cost_most_between_a_few_tokens_and_all_experts() -> None:
    """Of the recorded figures: three drafts cost 2.5 times a layer at batch 1, and nearly nothing more at 16."""
    seconds = {int(n): s for n, s in RECORDED["layer_s"].items()}
    assert seconds[4] / seconds[1] == pytest.approx(2.5, abs=0.05)
    assert seconds[64] / seconds[16] < 1.05
    rows = [report.row_of(row, 3) for row in RECORDED["rows"]]
    at = {row["batch"]: row["verify_cost"]["low"] for row in rows if row["model"] == "qwen3-30b-a3b, balanced"}
    assert at[4] > at[2] > at[1] > 1.5 and at[16] < 1.1
