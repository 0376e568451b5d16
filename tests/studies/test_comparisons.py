"""What studies compare: differences where they are significant, the best of several, and rows of a validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from studies import comparisons
from studies.common import parts, with_replays
from tests.support.tree_traces import tree_trace


def test_what_was_really_run_differs_by_more_than_the_noise_floor() -> None:
    base = np.linspace(1, 2, 16)
    rows = {name: {"sequence_seconds": base / s, "measured": {"estimate": s}} for name, s in (("a", 1.3), ("b", 1.28))}
    document = {"autoregressive_sequence_seconds": base, "noise_floor_percent": 1.0}
    noisy = {**document, "noise_floor_percent": 2.0}
    assert comparisons.differ_measured(document, rows["a"], rows["b"])
    assert not comparisons.differ_measured(noisy, rows["a"], rows["b"])
    assert comparisons.measured_gap(document, rows["a"], rows["b"], "b") == "0.020 [0.020, 0.020] above b"
    assert comparisons.measured_gap(noisy, rows["b"], rows["a"], "a") == (
        "0.020 [0.020, 0.020] below a, not significant"
    )


def test_the_best_of_several_is_picked_on_the_tuning_prompts() -> None:
    def row(policy: str, label: str, train: float, measured: float) -> dict[str, Any]:
        return {"policy": policy, "label": label, "train_speedup": train, "measured": {"estimate": measured}}

    greedy = [row("fixed_k", "k=3", 1.5, 1.2), row("fixed_k", "k=9", 1.0, 1.9), row("adaedl", "a", 1.1, 1.3)]
    best = comparisons.best_by(greedy, "policy")
    assert {name: row["label"] for name, row in best.items()} == {"fixed_k": "k=3", "adaedl": "a"}
    assert comparisons.first_best([]) is None


def test_rows_get_their_speedup_on_the_tuning_prompts_and_their_truncated_rounds() -> None:
    config = {"tuning_share": 0.5, "seed": 0}
    trace, cost = tree_trace(3, sequences=6, depth=5, width=5, nodes=12), ConstantCost(1.0, 10.0)
    rows = [{"policy": "pct", "params": {"max_depth": 5}}, {"policy": "fixed_k", "params": {"k": 3}}]
    document = with_replays({"rows": rows}, trace, cost, config)
    train, holdout = (PricedTrace(part, cost) for part in parts(trace, config))
    policy = make_policy("pct", {"max_depth": 5})
    assert document["rows"][0]["train_speedup"] == train.replay(policy).speedup != holdout.replay(policy).speedup
    replayed = holdout.replay(policy)
    assert document["rows"][0]["truncated_share"] == replayed.truncated.sum() / replayed.num_rounds.sum() > 0
    assert document["rows"][1]["truncated_share"] == 0 and document["step_ratio"] == pytest.approx(0.1)
