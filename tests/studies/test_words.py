"""What the studies' reports say alike: orders where they are decided, the best of several, and rows left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from specsim.speedup.intervals import ratio_interval
from studies import words
from studies.common import parts, with_replays, without_truncated
from tests.support.tree_traces import tree_trace

NAMES = {"a": "A", "b": "B", "c": "C", "d": "D"}


def order(values: dict[str, float], apart: float) -> str:
    return words.order_of(values, ("a", "b", "c", "d"), NAMES, lambda x, y: abs(values[x] - values[y]) > apart)


def test_an_order_is_the_papers_only_where_neighbours_differ_significantly() -> None:
    rising = {"a": 1.0, "b": 1.1, "c": 1.2, "d": 1.3}
    assert order(rising, 0.05) == "A (1.00) < B (1.10) < C (1.20) < D (1.30); as in the paper."
    assert order(rising, 0.15) == (
        "A (1.00) ~ B (1.10) ~ C (1.20) ~ D (1.30); not decided whether as in the paper, which has A < B < C < D: "
        "A and B, B and C, C and D do not differ significantly."
    )
    assert order({"a": 1.0, "c": 1.2, "d": 1.3}, 0.05).endswith("; as in the paper.")  # of those that were run


def test_an_order_is_not_the_papers_where_two_differ_the_other_way_round() -> None:
    turned = {"a": 1.0, "b": 1.1, "c": 1.4, "d": 1.3}
    assert order(turned, 0.05) == (
        "A (1.00) < B (1.10) < D (1.30) < C (1.40); not as in the paper, which has A < B < C < D: D below C."
    )
    assert order(turned, 0.15).startswith("A (1.00) ~ B (1.10) < D (1.30) ~ C (1.40); not decided")
    far = {"a": 1.2, "b": 1.1, "c": 1.0, "d": 1.3}  # no two neighbours are told apart, the ends of three are
    assert "not as in the paper" in order(far, 0.15) and order(far, 0.15).endswith(": C below A.")


def test_the_highest_is_the_papers_only_if_nothing_is_as_high() -> None:
    values = {"a": 1.0, "b": 1.2, "c": 1.25}

    def found(expected: str, apart: float) -> str:
        return words.highest(values, expected, NAMES, lambda x, y: abs(values[x] - values[y]) > apart)

    assert found("c", 0.01) == "C, as in the paper"
    assert found("c", 0.1) == "B, C; not decided whether as in the paper, which has C"
    assert found("a", 0.1) == "B, C; not as in the paper, which has A"


def test_above_one_is_corrected_for_how_many_were_chosen_among() -> None:
    """Of arms that all have a true speedup of 1, some is above 1 by itself far oftener than 5 %; not all together."""
    rng = np.random.default_rng(0)
    alone = together = 0
    trials, arms, sequences = 60, 12, 16
    for _ in range(trials):
        base = rng.uniform(1, 2, sequences)
        seconds = [(base, base * rng.lognormal(0, 0.1, sequences)) for _ in range(arms)]
        alone += any(ratio_interval(*one).low > 1 for one in seconds)
        together += any(words.above_one(seconds))
    assert alone / trials > 0.15 > 0.1 >= together / trials
    sure = (np.ones(16), rng.uniform(0.5, 0.6, 16))
    assert words.above_one([sure, (np.ones(16), np.ones(16))]) == [True, False]


def test_what_was_really_run_differs_by_more_than_the_noise_floor() -> None:
    base = np.linspace(1, 2, 16)
    rows = {name: {"sequence_seconds": base / s, "measured": {"estimate": s}} for name, s in (("a", 1.3), ("b", 1.28))}
    document = {"autoregressive_sequence_seconds": base, "noise_floor_percent": 1.0}
    noisy = {**document, "noise_floor_percent": 2.0}
    assert words.told_apart(document, rows["a"], rows["b"]) and not words.told_apart(noisy, rows["a"], rows["b"])
    assert words.measured_verdict(document, rows["a"], rows["b"]) == "+0.020 [+0.020, +0.020] better"
    assert words.measured_verdict(noisy, rows["a"], rows["b"]) == "+0.020 [+0.020, +0.020] below the noise floor"
    assert words.measured_verdict(noisy, rows["a"], None) == "not really run"


def board() -> dict[str, Any]:
    rows = [
        {"label": label, "truncated_share": cut, "sequence_seconds": [s, s * 1.1], "tied_with_leader": True}
        for label, cut, s in (("cut", 0.55, 1.0), ("first", 0.02, 1.25), ("second", 0.0, 1.5))
    ]
    skipped = [
        {"policy": "vct, full", "reason": "costs cover trees of up to 65 tokens, policy vct() may need 364; lower it"},
        {"policy": "space_k", "reason": "meant for drafters of kind space"},
    ]
    return {"rows": rows, "baseline_s": [2.0, 2.1], "skipped": skipped}


def test_rows_that_the_record_truncates_are_left_out_and_named() -> None:
    found = without_truncated(board())
    assert [row["label"] for row in found["rows"]] == ["first", "second"]
    first, second = found["rows"]
    assert first["leader_minus_this"] is None and not first["tied_with_leader"]
    assert second["leader_minus_this"]["difference"]["estimate"] == pytest.approx(4.1 / 2.625 - 4.1 / 3.15)
    lines = words.not_compared(found, "paper's costs")
    assert lines[0] == "Left out, as more than 5 % of their rounds ask for nodes that were not recorded: cut (55.0 %)."
    assert lines[2] == "Not compared at paper's costs, as they may verify more than 64 nodes: vct, full."
    assert lines[4] == "Not on this board: space_k: meant for drafters of kind space."
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
    assert replayed.truncated is not None
    assert document["rows"][0]["truncated_share"] == replayed.truncated.sum() / replayed.num_rounds.sum() > 0
    assert document["rows"][1]["truncated_share"] == 0 and document["step_ratio"] == pytest.approx(0.1)


def test_a_deepened_target_is_said_to_be_one() -> None:
    text = words.about_target({"target": "lab-deep:24"})
    assert "acceptance of the trained model" in text and "cost of a deep one" in text
    assert words.about_target({"target": "lab"}) == "The target is lab."
