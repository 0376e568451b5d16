"""From counts to a prediction, and Eq. 14 beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specsim.cost.profile import ProfileCost
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.prediction import predict_policy, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import write_trace
from studies.papers.tables import read_table
from tests.support.commands import call, json_of
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


def test_eq14_is_the_prediction_where_nothing_was_simplified_away_and_hides_the_rest() -> None:
    """Outputs ended by their budget, a time per draft step and a time per round."""
    rng = np.random.default_rng(3)
    trace = build_trace(rng, rng.random((80, 6)) < 0.8, [40, 25, 15])
    prediction = predict_policy(PricedTrace(trace, flat_profile()), POLICY)
    assert prediction.cost_ratio == pytest.approx(0.1, rel=1e-12)
    assert prediction.eq14 == pytest.approx(prediction.speedup.estimate, rel=1e-12)
    eq13_s = prediction.drafted * 1e-3 + prediction.rounds * 1e-2
    assert prediction.seconds == pytest.approx(eq13_s, rel=1e-12)
    dearer = predict_policy(PricedTrace(trace, flat_profile(step=1e-4)), POLICY)
    assert dearer.eq14 == prediction.eq14 and dearer.speedup.estimate < prediction.speedup.estimate


def test_eq14_is_not_said_of_space() -> None:
    """Its masks take no draft pass each, whether the policy says so or the trace is of such a drafter."""
    space = small_trace()
    space = replace(space, meta={**space.meta, "drafter_kind": "space"})
    cost = replace(flat_profile(), verify_s=np.full((80, 2), 1e-2))
    for trace, policy in ((small_trace(), SpaceK(k=2)), (space, SpaceK(k=2)), (space, FixedK(k=2))):
        prediction = predict_policy(PricedTrace(trace, cost), policy)
        assert prediction.eq14 is None and prediction.as_dict()["eq14"] is None


def test_a_replay_says_where_another_drafter_is_priced_as_space() -> None:
    """Its drafts are then free, so it may pass the oracle, which pays for its own: no bound, and nobody's speed."""
    space = small_trace()
    space = replace(space, meta={**space.meta, "drafter_kind": "space"})
    cost = replace(flat_profile(), verify_s=np.full((80, 2), 1e-2), draft_step_s=np.full((6, 2), 5e-3))
    other = predict_policy(PricedTrace(small_trace(), cost), SpaceK(k=4))
    assert other.oracle_regret is not None and other.oracle_regret < 0
    assert any("as if masks of SPACE" in note for note in other.notes)
    for policy in (SpaceK(k=2), FixedK(k=2)):
        assert not any("SPACE" in note for note in predict_policy(PricedTrace(space, cost), policy).notes)


def test_a_replay_of_eesd_s_row_has_the_printed_speedup_and_eq14_of_it_by_hand(tmp_path: Path) -> None:
    """LLaMA-2-13B, Beta-TS, XSum: v_d 0.48 and r_d 0.66 of table 11, the seconds of 512 tokens of table 8."""
    row = read_table("eesd_11").row("LLaMA-2-13B", "EESD (+Beta-TS)")
    parts = read_table("eesd_8").row("LLaMA-2-13B", "EESD (+Beta-TS)")
    plain_s, v_d, r_d = 22.46, row.number("v_d"), row.number("r_d")
    tokens, rounds, accepted, drafted = 200, 68, 132, 275  # 132 / 275 = 0.48, 132 / 200 = 0.66
    assert (accepted / drafted, accepted / tokens) == (v_d, r_d)
    lengths = [5] * 3 + [4] * 65  # of the drafts; ends where the drafter is not sure
    hits, confidence, at = np.zeros((tokens, 5), dtype=bool), np.full((tokens, 5), 0.9), 0
    for number, length in enumerate(lengths):
        right = 2 if number < rounds - 4 else 1  # 64 x 2 + 4 x 1
        hits[at, :right], confidence[at, length - 1] = True, 0.1
        at += right + 1
    assert at == tokens and sum(lengths) == drafted
    open_end = {"spare_budget": [9], "ends_by_eos": [True]}  # so that no draft is cut short
    trace = build_trace(np.random.default_rng(0), hits, [tokens], confidence=confidence, **open_end)
    write_trace(trace, tmp_path / "trace")
    each = 512 / tokens
    header = {"kind": "specsim-cost", "version": 1, "form": "constant", "source": "table 8", "date": "2024"}
    costs = {
        **header,
        "s_d": parts.number("drafting_s") / (drafted * each),
        "s_t": plain_s / 512,
        "round_s": (row.number("time_s") - parts.number("drafting_s")) / (rounds * each) - plain_s / 512,
    }
    (tmp_path / "cost.json").write_text(json.dumps(costs))
    options = ["--policy", "max_confidence", "--set", "lambda0=0.5", "--cost", str(tmp_path / "cost.json")]
    document = json_of(call("specsim", "replay", tmp_path / "trace", *options, "--json"))
    assert (document["v_d"], document["r_d"]) == (v_d, r_d)
    assert document["speedup"]["estimate"] == pytest.approx(row.number("speedup"), abs=0.005)
    by_hand = 0.48 / ((document["cost_ratio"] - 0.48) * 0.66 + 0.48)
    assert document["eq14"] == pytest.approx(by_hand, rel=1e-12)
    assert document["eq14"] == pytest.approx(plain_s / (parts.number("drafting_s") + 0.34 * plain_s), rel=1e-9)
