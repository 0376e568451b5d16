"""Costs of an engine's rounds from its own seconds, and tokens per second predicted from them."""

from __future__ import annotations

import numpy as np
import pytest

from realrun.engines.costs import EngineCosts, Rounds, Timed, fit_costs
from realrun.engines.engine import Setting, Turn
from realrun.engines.llamacpp import LlamaCppEngine
from realrun.engines.validate import compared, plan_of, replayed_rounds, turns_of, typical
from specsim.io.errors import InputError
from tests.realrun.engines.test_compare import LIMIT, made_trace

TRUE = EngineCosts(draft_s=0.002, pass_s=0.001, verified=(0, 2, 4, 8), round_s=(0.010, 0.012, 0.013, 0.019))


def rounds_of(k: int) -> Rounds:
    """Fifty rounds of K tokens, the last few of which are shorter, as at the end of a text."""
    verified = np.minimum(k, np.maximum(0, 49 - np.arange(50)))
    return Rounds(verified.copy(), verified) if k else Rounds(np.zeros(50, np.int64), np.zeros(50, np.int64))


def timed(rounds: Rounds) -> Timed:
    draft_s = TRUE.draft_s * np.count_nonzero(rounds.passes) + TRUE.pass_s * rounds.passes.sum()
    return Timed(rounds, TRUE.seconds(rounds), float(draft_s))


def test_costs_come_back_from_seconds() -> None:
    fitted = fit_costs([timed(rounds_of(k)) for k in (0, 2, 4, 8)], [2, 4, 8])
    assert fitted.verified == TRUE.verified
    assert [fitted.draft_s, fitted.pass_s, *fitted.round_s] == pytest.approx([TRUE.draft_s, TRUE.pass_s, *TRUE.round_s])


def test_a_round_between_and_beyond_lies_on_the_line() -> None:
    def alone(passes: int, verified: int) -> float:
        return TRUE.seconds(Rounds(np.array([passes]), np.array([verified])))

    assert alone(0, 0) == pytest.approx(0.010)  # nothing is drafted, so no draft begins
    assert alone(1, 0) == pytest.approx(0.010 + 0.003)  # a token that was dropped
    assert alone(1, 1) == pytest.approx(0.011 + 0.003)
    assert alone(6, 6) == pytest.approx(0.016 + 0.008)
    assert alone(10, 10) == pytest.approx(0.022 + 0.012)


def test_predicted_beside_measured() -> None:
    """On a machine without noise that is as the costs say, all is predicted but for a setting made slower."""
    plan = plan_of([1, 4], [2, 3], [0.5])
    assert [str(arm) for arm in plan.arms] == [
        "no speculation", "K = 1", "K = 4", "K = 2", "K = 3", "K = 4, p_min = 0.5", "no speculation"
    ]  # fmt: skip
    trace, engine = made_trace(), LlamaCppEngine()
    rounds = [replayed_rounds(trace, engine, arm, LIMIT) for arm in plan.arms]
    slower = {plan.arms.index(Setting(2)): 1.25}
    by_arm = [
        [Turn(LIMIT, TRUE.seconds(sequence) * slower.get(arm, 1.0), 0.0) for sequence in sequences]
        for arm, sequences in enumerate(rounds)
    ]
    document = compared(plan, by_arm, rounds, TRUE)
    assert document["noise_floor_percent"] == pytest.approx(0, abs=1e-9)
    errors = {row["setting"]: row["error_percent"] for row in document["rows"]}
    assert errors.pop("K = 2") == pytest.approx(25)
    assert [*errors.values()] == pytest.approx([0.0] * 5)
    assert [row["profiled"] for row in document["rows"]] == [True] * 3 + [False] * 3
    assert document["median_abs_error_percent"] == pytest.approx(0) and document[
        "max_abs_error_percent"
    ] == pytest.approx(25)
    assert document["rows"][0]["measured_tokens_per_second"] == pytest.approx((LIMIT / (LIMIT - 1)) / 0.010)
    settings = {row["setting"]: row["measured_speedup"]["estimate"] for row in document["rows"] if not row["profiled"]}
    choice = document["choice"]
    assert choice["measured"] == max(settings, key=lambda name: settings[name])
    lead = settings[choice["measured"]] - settings[choice["forecast"]]
    assert choice["regret"]["estimate"] == pytest.approx(lead)


def test_rounds_of_a_replay_are_those_of_the_engine() -> None:
    trace, engine = made_trace(), LlamaCppEngine()
    plain = replayed_rounds(trace, engine, Setting(0), LIMIT)
    assert [len(sequence.passes) for sequence in plain] == [LIMIT - 1] * 3 and not any(
        sequence.passes.any() for sequence in plain
    )
    dropping = replayed_rounds(trace, engine, Setting(4, 0.5), LIMIT)
    dropped = np.concatenate([sequence.passes - sequence.verified for sequence in dropping])
    assert {*dropped.tolist()} == {0, 1}


def test_all_settings_take_turns_on_every_prompt() -> None:
    turns = turns_of(4, 3, 3, seed=1)
    assert turns[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    blocks = [turns[at : at + 4] for at in range(4, len(turns), 4)]
    assert [{prompt for _, prompt in block} for block in blocks] == [{0}, {1}, {2}] * 3
    assert all({arm for arm, _ in block} == {0, 1, 2, 3} for block in blocks)
    assert len({tuple(arm for arm, _ in block) for block in blocks}) > 1
    results = [Turn(9, float(i), 0.0) for i in range(len(turns))]
    chosen = typical(turns, results, 4, 3)
    assert chosen[2][1].whole_s == float(4 + 4 * 4 + blocks[4].index((2, 1)))  # the middle one; warm-up does not count


@pytest.mark.parametrize(
    ("profiled", "ks", "p_mins", "says"),
    [
        ([3], [2], [], "--profile-k of 3; give two"),
        ([1, 3], [3], [], "K = 3 is both profiled and predicted"),
        ([1, 3], [], [], "nothing to predict"),
        ([0, 3], [2], [], "from 1 on"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(profiled: list[int], ks: list[int], p_mins: list[float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan_of(profiled, ks, p_mins)
