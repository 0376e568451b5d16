"""From counts to a prediction, and the rungs of the ladder."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from specsim.cost.profile import ProfileCost
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.prediction import ladder, predict_policy, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.reference import RampCost, build_trace, small_trace

POLICY = AdaEDL(lambda0=0.1, max_draft_tokens=6)


def flat_profile(step: float = 0.0) -> ProfileCost:
    """s_d = 1 ms, s_t = 10 ms at every context; `step` adds what the papers' cost leaves out."""
    contexts = np.array([0, 100])
    return ProfileCost(
        contexts=contexts,
        draft_step_s=np.full((6, 2), 1e-3),
        catch_up_s=np.zeros(2),
        verify_s=1e-2 + step * np.arange(7)[:, None] * np.ones(2),
        autoregressive_s=np.full(2, 1e-2),
        policy_step_s=step,
        round_overhead_s=step,
    )


def test_a_prediction_is_its_counts() -> None:
    trace = small_trace()
    prediction = predict_policy(PricedTrace(trace, RampCost()), POLICY)
    result = replay(trace, POLICY, cost_table(trace, RampCost()))
    counts = (prediction.rounds, prediction.drafted, prediction.accepted, prediction.output_tokens)
    assert counts == tuple(
        int(c.sum()) for c in (result.num_rounds, result.drafted, result.accepted, result.output_tokens)
    )
    assert (prediction.v_d, prediction.r_d) == (prediction.accepted / prediction.drafted, prediction.accepted / 102)
    assert prediction.tau == 102 / prediction.rounds
    assert prediction.hm == pytest.approx(2 / (1 / prediction.v_d + 1 / prediction.r_d))
    assert prediction.seconds == result.seconds.sum() and prediction.ar_seconds == result.autoregressive_s.sum()
    assert prediction.speedup == ratio_interval(result.autoregressive_s, result.speculative_s)
    assert prediction.speedup.estimate == pytest.approx(result.speedup)
    assert prediction.speedup.low < result.speedup < prediction.speedup.high


def test_the_json_form_survives_json() -> None:
    document = predict_policy(PricedTrace(small_trace(), RampCost()), POLICY).as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["policy"] == "adaedl" and document["params"]["lambda0"] == 0.1


def test_regret_is_the_share_of_seconds_above_the_oracles() -> None:
    trace = small_trace()
    table = cost_table(trace, RampCost())
    prediction, bound_s = predict_policy(PricedTrace(trace, RampCost()), POLICY), chain_oracle_seconds(trace, table)
    assert prediction.oracle_regret == pytest.approx(prediction.seconds / bound_s.sum() - 1, rel=1e-12)
    assert prediction.oracle_regret > 0
    assert prediction.as_dict()["oracle_regret"] == prediction.oracle_regret
    assert summarise(replay(trace, POLICY, table)).as_dict()["oracle_regret"] is None


def test_regret_compares_a_reshaped_round_with_the_oracle_of_the_unshaped_one() -> None:
    """SPACE drafts inside the pass: here that is cheaper than any drafter of its own can be."""
    rng = np.random.default_rng(3)
    trace = build_trace(rng, np.ones((80, 2), dtype=bool), [40, 40])
    cost = replace(flat_profile(), draft_step_s=np.full((6, 2), 0.5), verify_s=np.full((9, 2), 1e-2))
    shaped = predict_policy(PricedTrace(trace, cost), SpaceK(k=2))
    assert shaped.seconds == pytest.approx(shaped.rounds * 1e-2)
    plain_s = chain_oracle_seconds(trace, cost_table(trace, cost)).sum()
    assert plain_s == pytest.approx(0.8)  # the oracle drafts nothing at half a second a step
    assert shaped.oracle_regret == pytest.approx(shaped.seconds / plain_s - 1)
    assert shaped.oracle_regret < 0
    assert predict_policy(PricedTrace(trace, cost), FixedK(k=2)).seconds > plain_s


def test_the_rungs_agree_where_nothing_was_simplified_away() -> None:
    """Outputs ended by their budget, a time per draft step and a time per round."""
    rng = np.random.default_rng(3)
    trace = build_trace(rng, rng.random((80, 6)) < 0.8, [40, 25, 15])
    rungs = ladder(trace, POLICY, flat_profile())
    assert rungs.constant == rungs.profile
    assert rungs.eq14 == pytest.approx(rungs.constant, rel=1e-12)
    prediction = predict_policy(PricedTrace(trace, flat_profile()), POLICY)
    eq13_s = prediction.drafted * 1e-3 + prediction.rounds * 1e-2
    assert prediction.seconds == pytest.approx(eq13_s, rel=1e-12)


def test_a_rung_shows_what_its_simplification_hides() -> None:
    rng = np.random.default_rng(3)
    trace = build_trace(rng, rng.random((80, 6)) < 0.8, [40, 25, 15])
    rungs, exact = ladder(trace, POLICY, flat_profile(step=1e-4)), ladder(trace, POLICY, flat_profile())
    assert rungs.profile < rungs.constant == exact.constant
    assert rungs.eq14 == exact.eq14
