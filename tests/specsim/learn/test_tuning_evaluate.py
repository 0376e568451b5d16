"""Many configurations at once give what single replays give."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from specsim.io.errors import InputError
from specsim.learn import evaluate, race
from specsim.learn.evaluate import Evaluator, evaluate_many
from specsim.learn.race import EFFORT, in_the_race, rungs, shuffled
from specsim.learn.search import find_best, fixed_settings
from specsim.learn.settings import SearchSettings
from specsim.learn.space import search_space
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import carrying, stretchy_trace


@pytest.mark.parametrize("jobs", [1, 2, 7])
@pytest.mark.parametrize("block", [1, 60, 1 << 14])
def test_every_configuration_equals_its_own_replay(monkeypatch: pytest.MonkeyPatch, jobs: int, block: int) -> None:
    monkeypatch.setattr(evaluate, "BLOCK_ROWS", block)
    trace, table = small_trace(), cost_table(small_trace(), RampCost())
    settings = [{"gamma": 0.1 * i, "lambda0": 0.3, "max_draft_tokens": i} for i in range(1, 8)]
    evaluated = evaluate_many(AdaEDL, settings, PricedTrace(trace, RampCost()), jobs=jobs)
    for i, policy in enumerate(evaluated.policies[:6]):
        assert policy.settings.items() >= settings[i].items()
        assert evaluated.speedup[i] == pytest.approx(replay(trace, policy, table).speedup, rel=1e-15)
    assert evaluated.policies[6] is None and "depth 6" in str(evaluated.reasons[6])  # deeper than recorded
    assert math.isinf(evaluated.seconds[6]) and evaluated.speedup[6] == 0 and evaluated.reasons[:6] == [None] * 6


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_carried_state_passes_through_all_sequences(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setattr(evaluate, "BLOCK_ROWS", 50)
    trace = stretchy_trace(9, 40)
    policies = carrying(trace)
    assert [policy.carries_state for policy in policies] == [True, False, False]
    seconds = Evaluator(HuggingFace, PricedTrace(trace, RampCost()), jobs=jobs).seconds(policies)
    table = cost_table(trace, RampCost())
    for policy, row in zip(policies, seconds, strict=True):
        np.testing.assert_array_equal(row, replay(trace, policy, table).speculative_s)


def test_any_sequences_in_any_order() -> None:
    trace, which = small_trace(), np.array([4, 0, 2])
    policies = [MaxConfidence(lambda0=x, max_draft_tokens=6) for x in (0.1, 0.5)]
    seconds = Evaluator(MaxConfidence, PricedTrace(trace, RampCost())).seconds(policies, which)
    table = cost_table(trace, RampCost())
    for policy, row in zip(policies, seconds, strict=True):
        np.testing.assert_array_equal(row, replay(trace, policy, table).speculative_s[which])


def test_draws_of_rejection_sampling_are_summed() -> None:
    exact = small_trace(accept_prob=np.full((102, 6), 0.7, dtype=np.float32))
    trace = dataclasses.replace(exact, meta={**exact.meta, "decoding": {"mode": "rejection"}})
    assert trace.approximate
    evaluated = evaluate_many(AdaEDL, [{"max_draft_tokens": 6}], PricedTrace(trace, RampCost()), seed=3)
    expected = replay(trace, AdaEDL(max_draft_tokens=6), cost_table(trace, RampCost()), seed=3)
    assert evaluated.seconds[0] == pytest.approx(expected.seconds.sum(), rel=1e-15)
    assert evaluated.speedup[0] == pytest.approx(expected.speedup, rel=1e-15)


def test_nothing_to_evaluate() -> None:
    assert evaluate_many(AdaEDL, [], PricedTrace(small_trace(), RampCost())).speedup.shape == (0,)


@pytest.fixture(scope="module")
def long_trace() -> Trace:
    return stretchy_trace(120, 300)


@pytest.mark.parametrize("kind", [AdaEDL, MaxConfidence, HuggingFace])
def test_a_race_comes_within_half_a_percent_of_brute_force_at_a_tenth_of_its_work(
    long_trace: Trace, kind: type[AdaEDL]
) -> None:
    held = fixed_settings(kind, {}, {"depth": long_trace.depth})
    for seed in range(3):
        points = [{**held, **p} for p in search_space(kind, held, {"depth": long_trace.depth}).sobol(400, seed)]
        brute = evaluate_many(kind, points, PricedTrace(long_trace, RampCost()), seed=seed)
        search_result = find_best(
            kind, PricedTrace(long_trace, RampCost()), SearchSettings(search="race", trials=400, seed=seed)
        )
        assert search_result.trials == 400 and search_result.work <= EFFORT + 1e-9
        speedup = replay(long_trace, search_result.best, cost_table(long_trace, RampCost()), seed=seed).speedup
        assert brute.speedup.max() * 0.995 <= speedup <= brute.speedup.max() * (1 + 1e-12)


def test_a_race_of_carried_states_ends_with_exact_seconds() -> None:
    trace = stretchy_trace(40, 60)
    fixed = {"schedule": "heuristic"}
    search_result = find_best(
        HuggingFace, PricedTrace(trace, RampCost()), SearchSettings(search="race", trials=100, fixed=fixed)
    )
    assert search_result.best.carries_state and search_result.work < 2 * EFFORT
    held = fixed_settings(HuggingFace, fixed, {"depth": trace.depth})
    points = [{**held, **p} for p in search_space(HuggingFace, held, {"depth": trace.depth}).sobol(100, 0)]
    brute = evaluate_many(HuggingFace, points, PricedTrace(trace, RampCost()))
    assert replay(trace, search_result.best, cost_table(trace, RampCost())).speedup >= 0.98 * brute.speedup.max()


def test_who_stays_in_the_race() -> None:
    rng = np.random.default_rng(0)
    sequence = rng.exponential(size=30)  # what all share
    slower = np.array([0.0, 0.001, 0.5, 0.002])
    seconds = 1 + sequence + slower[:, None] + 0.02 * rng.normal(size=(4, 30))
    kept = in_the_race(seconds, room=4)
    assert 2 not in kept and len(kept) == 3  # surely slower, although sequences differ by more
    assert in_the_race(seconds, room=2) == kept[:2]
    assert in_the_race(seconds[:, :1], room=4) == np.argsort(seconds[:, 0]).tolist()  # a single sequence tests nothing
    same = np.ones((3, 5))
    assert in_the_race(same, room=3) == [0, 1, 2]


def test_rungs_double_up_to_all_sequences() -> None:
    rows = np.arange(0, 101)
    assert rungs(rows, 0.025) == [2, 4, 8, 16, 32, 64, 100]
    assert rungs(rows[:6], 0.025) == [1, 2, 4, 5]
    assert rungs(rows[:2], 0.025) == [1]


def test_the_first_sequences_of_a_race_stand_for_all_domains() -> None:
    trace = stretchy_trace(40, 5)
    order = shuffled(trace, 0)
    assert sorted(order.tolist()) == list(range(40))
    for n in (2, 4, 10, 20):
        assert (trace.domain[order[:n]] == "code").sum() == pytest.approx(n / 2, abs=1)
    assert shuffled(trace, 1).tolist() != order.tolist()


def test_a_race_without_a_starter_gives_the_reason() -> None:
    with pytest.raises(InputError, match="depth 6"):
        find_best(
            AdaEDL,
            PricedTrace(small_trace(), RampCost()),
            SearchSettings(search="race", trials=10, fixed={"max_draft_tokens": 9}),
        )
    assert race.FINALISTS >= 2
