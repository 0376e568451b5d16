"""What studies compare: orders where they are significant, the best of several, and rows left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.priced import PricedTrace
from studies import comparisons
from studies.common import parts, with_replays, without_truncated
from tests.support.tree_traces import tree_trace

NAMES = {"a": "A", "b": "B", "c": "C", "d": "D"}


def order(values: dict[str, float], least: float) -> str:
    """The order found where differences above `least` are significant."""
    return comparisons.order_of(values, ("a", "b", "c", "d"), NAMES, lambda x, y: abs(values[x] - values[y]) > least)


def test_an_order_is_the_papers_only_where_neighbours_differ_significantly() -> None:
    rising = {"a": 1.0, "b": 1.1, "c": 1.2, "d": 1.3}
    assert order(rising, 0.05) == "A (1.00) < B (1.10) < C (1.20) < D (1.30), as in the paper"
    assert order(rising, 0.15) == (
        "A (1.00) ~ B (1.10) ~ C (1.20) ~ D (1.30), which does not differ significantly from the paper's order, "
        "A < B < C < D"
    )
    assert order({"a": 1.0, "c": 1.2, "d": 1.3}, 0.05).endswith(", as in the paper")  # of those that were run


def test_an_order_is_not_the_papers_where_two_differ_the_other_way_round() -> None:
    turned = {"a": 1.0, "b": 1.1, "c": 1.4, "d": 1.3}
    assert order(turned, 0.05) == "A (1.00) < B (1.10) < D (1.30) < C (1.40); the paper's order is A < B < C < D"
    assert "not differ significantly" in order(turned, 0.15)
    far = {"a": 1.2, "b": 1.1, "c": 1.0, "d": 1.3}  # no two neighbours differ significantly, the ends of three do
    assert order(far, 0.15).endswith("; the paper's order is A < B < C < D")


def test_above_one_is_corrected_for_how_many_were_chosen_among() -> None:
    """Of arms that all have a true speedup of 1, some is above 1 by itself far oftener than 5 %; not all together."""
    rng = np.random.default_rng(0)
    alone = together = 0
    trials, arms, sequences = 60, 12, 16
    for _ in range(trials):
        base = rng.uniform(1, 2, sequences)
        seconds = [(base, base * rng.lognormal(0, 0.1, sequences)) for _ in range(arms)]
        alone += any(ratio_interval(*arm).low > 1 for arm in seconds)
        together += any(comparisons.above_one(seconds))
    assert alone / trials > 0.15 > 0.1 >= together / trials
    sure = (np.ones(16), rng.uniform(0.5, 0.6, 16))
    assert comparisons.above_one([sure, (np.ones(16), np.ones(16))]) == [True, False]


def test_what_was_really_run_differs_by_more_than_the_noise_floor() -> None:
    base = np.linspace(1, 2, 16)
    rows = {name: {"sequence_seconds": base / s, "measured": {"estimate": s}} for name, s in (("a", 1.3), ("b", 1.28))}
    document = {"autoregressive_sequence_seconds": base, "noise_floor_percent": 1.0}
    noisy = {**document, "noise_floor_percent": 2.0}
    assert comparisons.differ_measured(document, rows["a"], rows["b"])
    assert not comparisons.differ_measured(noisy, rows["a"], rows["b"])
    assert comparisons.measured_verdict(document, rows["a"], rows["b"]) == "+0.020 [+0.020, +0.020]"
    assert comparisons.measured_verdict(noisy, rows["a"], rows["b"]) == "+0.020 [+0.020, +0.020], not significant"
    assert comparisons.measured_gap(document, rows["a"], rows["b"], "b") == "0.020 [0.020, 0.020] above b"
    assert comparisons.measured_gap(noisy, rows["b"], rows["a"], "a") == (
        "0.020 [0.020, 0.020] below a, not significant"
    )


def test_the_best_of_several_is_picked_on_the_tuning_prompts_of_each_run() -> None:
    def row(policy: str, label: str, train: float, measured: float) -> dict[str, Any]:
        return {"policy": policy, "label": label, "train_speedup": train, "measured": {"estimate": measured}}

    greedy = [row("fixed_k", "k=3", 1.5, 1.2), row("fixed_k", "k=9", 1.0, 1.9), row("adaedl", "a", 1.1, 1.3)]
    warm = [row("fixed_k", "k=3", 1.0, 1.1), row("fixed_k", "k=2", 1.4, 0.9), row("adaedl", "a", 1.1, 1.0)]
    shown = comparisons.ranked_rows({"greedy": greedy, "T = 1": warm}, "policy")
    assert [(row["label"], row["measured_T = 1"]["estimate"]) for row in shown] == [("a", 1.0), ("k=3", 0.9)]
    assert comparisons.first_best([]) is None


def board() -> dict[str, Any]:
    rows = [
        {"label": label, "truncated_share": cut, "sequence_seconds": [s, s * 1.1], "tied_with_leader": True}
        for label, cut, s in (("cut", 0.55, 1.0), ("first", 0.02, 1.25), ("second", 0.0, 1.5))
    ]
    return {"rows": rows, "baseline_s": [2.0, 2.1]}


def test_rows_that_the_record_truncates_are_left_out_and_named() -> None:
    left = without_truncated(board())
    assert [row["label"] for row in left["rows"]] == ["first", "second"]
    first, second = left["rows"]
    assert first["leader_minus_this"] is None and not first["tied_with_leader"]
    assert second["leader_minus_this"]["difference"]["estimate"] == pytest.approx(4.1 / 2.625 - 4.1 / 3.15)
    assert left["left_out"] == [{"policy": "cut", "truncated_share": 0.55}]
    whole = board()
    whole["rows"] = whole["rows"][1:]
    assert without_truncated(whole)["rows"] == whole["rows"] and without_truncated(whole)["left_out"] == []


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
