"""Many configurations at once give what single replays give."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from specsim.learn import evaluate
from specsim.learn.evaluate import Evaluator, evaluate_many
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
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
