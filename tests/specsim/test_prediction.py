"""From counts to a prediction, and the rungs of the ladder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference import RampCost, build_trace, small_trace

from specsim.bootstrap import ratio_interval
from specsim.cost import ProfileCost
from specsim.metrics import eq13_time_s
from specsim.policy import AdaEDL
from specsim.prediction import ladder, predict
from specsim.replay import compile_for, replay

POLICY = AdaEDL(lambda0=0.1, max_draft=6)


def flat_profile(step: float = 0.0) -> ProfileCost:
    """s_d = 1 ms, s_t = 10 ms at every context; `step` adds what the papers' cost leaves out."""
    contexts = np.array([0, 100])
    return ProfileCost(
        contexts=contexts,
        draft_s=np.full((2, 2), 1e-3),
        verify_s=1e-2 + step * np.arange(7)[:, None] * np.ones(2),
        autoregressive_s=np.full(2, 1e-2),
        policy_step_s=step,
        round_overhead_s=step,
    )


def test_a_prediction_is_its_counts() -> None:
    trace = small_trace()
    found = predict(trace, POLICY, RampCost())
    result = replay(trace, POLICY, compile_for(trace, RampCost()))
    counts = (found.rounds, found.drafted, found.accepted, found.output_tokens)
    assert counts == tuple(int(c.sum()) for c in (result.rounds, result.drafted, result.accepted, result.output_tokens))
    assert (found.v_d, found.r_d) == (found.accepted / found.drafted, found.accepted / 102)
    assert found.tau == 102 / found.rounds
    assert found.hm == pytest.approx(2 / (1 / found.v_d + 1 / found.r_d))
    assert found.seconds == result.seconds.sum() and found.ar_seconds == result.autoregressive_s.sum()
    assert found.speedup == ratio_interval(result.autoregressive_s, result.speculative_s)
    assert found.speedup.estimate == pytest.approx(result.speedup)
    assert found.speedup.low < result.speedup < found.speedup.high


def test_the_json_form_survives_json() -> None:
    found = predict(small_trace(), POLICY, RampCost()).as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["policy"] == "adaedl" and found["params"]["lambda0"] == 0.1


def test_the_rungs_agree_where_nothing_was_simplified_away() -> None:
    """Outputs ended by their budget, one time per draft step and one per round."""
    rng = np.random.default_rng(3)
    trace = build_trace(rng, rng.random((80, 6)) < 0.8, [40, 25, 15])
    rungs = ladder(trace, POLICY, flat_profile())
    assert rungs.constant == rungs.profile
    assert rungs.eq14 == pytest.approx(rungs.constant, rel=1e-12)
    found = predict(trace, POLICY, flat_profile())
    eq13_s = float(eq13_time_s(found.drafted, found.rounds, 1e-3, 1e-2))
    assert found.seconds == pytest.approx(eq13_s, rel=1e-12)


def test_a_rung_shows_what_its_simplification_hides() -> None:
    rng = np.random.default_rng(3)
    trace = build_trace(rng, rng.random((80, 6)) < 0.8, [40, 25, 15])
    rungs, exact = ladder(trace, POLICY, flat_profile(step=1e-4)), ladder(trace, POLICY, flat_profile())
    assert rungs.profile < rungs.constant == exact.constant
    assert rungs.eq14 == exact.eq14
