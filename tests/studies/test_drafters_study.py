"""The study of drafters inside the target: which rows it compares, and which drafters it says pay."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from studies.drafters import report


def row(policy: str, label: str, measured: float, train: float, role: str = "tuned") -> dict[str, Any]:
    return {
        "policy": policy, "label": label, "role": role, "train_speedup": train,
        "measured": {"estimate": measured, "low": measured - 0.01, "high": measured + 0.01},
        "sequence_seconds": [3 / measured, 2 / measured],
    }  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    rows = [
        row("fixed_k", "fixed_k(k=2)", 1.25, 1.2),
        row("beta_ts", "beta_ts()", 1.0, 1.1),
        row("cali_ts", "cali_ts()", 1.2, 1.3),
        row("max_confidence", "max_confidence()", 1.15, 1.15),
        row("adaedl", "adaedl()", 1.5, 1.05),  # best on the held-out prompts alone
        row("sparse_tree", "sparse_tree()", 0.9, 0.9),
    ]
    return {"rows": rows, "autoregressive_sequence_seconds": [3.0, 2.0], "noise_floor_percent": 0.5}


def test_contenders_are_the_rows_that_are_best_on_the_tuning_prompts(document: dict[str, Any]) -> None:
    contenders = report.contenders({"eesd": document})
    assert {name: row["label"] for name, row in contenders.items()} == {
        "eesd, fixed_k": "fixed_k(k=2)",
        "eesd, chain": "cali_ts()",
        "eesd, tree": "sparse_tree()",
    }


def test_thompson_sampling_is_compared_with_the_best_tuned_fixed_k(document: dict[str, Any]) -> None:
    document["rows"].append(row("fixed_k", "fixed_k(k=10)", 1.9, 1.9, role="the paper's"))
    (gain,) = report.thompson_gains({"eesd": document})
    assert gain.startswith("eesd -0.050 [") and not gain.endswith("not significant")


def test_a_drafter_pays_where_it_is_above_1_by_more_than_the_noise_floor(document: dict[str, Any]) -> None:
    slow = {**document, "rows": [row("fixed_k", "fixed_k(k=1)", 0.9, 1.1), row("beta_ts", "beta_ts()", 1.95, 0.9)]}
    assert report.paying({"eesd": document, "medusa-1": slow}) == ["eesd"]
    assert report.paying({"eesd": {**document, "noise_floor_percent": 30.0}}) == []


def test_early_exits_on_uneven_blocks_are_withdrawn() -> None:
    ran = {name: {"block_expansion": {"after": 4, "blocks": 32}} for name in ("model", "eesd")}
    assert [*report.without_withdrawn({"target": "lab-deep"}, ran)] == ["model"]
    assert [*report.without_withdrawn({"target": "lab"}, ran)] == [*ran]
    even = {name: {"block_expansion": {"core_layers": 8}} for name in ran}
    assert [*report.without_withdrawn({"target": "lab-deep"}, even)] == [*ran]
