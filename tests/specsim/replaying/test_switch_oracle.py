"""The oracle of a joined trace: by enumeration, and beyond every policy and every single drafter."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from specsim.cost.joined import JoinedCost
from specsim.cost.model import ConstantCost
from specsim.learn.fit import fit
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import BEST_FIXED_K, tune_on
from specsim.policy.base import Policy
from specsim.policy.registry import SWITCH_POLICIES, make_policy
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.prediction import oracle_seconds, predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace
from tests.support.joined_traces import joined_trace
from tests.support.reference import RampCost

COST = JoinedCost((RampCost(), RampCost(1e-6), ConstantCost(5e-4, 1e-2)))


def least_by_trying(trace: JoinedTrace, cost: JoinedCost, sequence: int) -> float:
    """All choices of drafter and length, position by position."""
    start, end = trace.offsets[sequence : sequence + 2].tolist()
    prompt = int(trace.prompt_tokens[sequence])
    low, high = trace.prompt_tokens.min() - 1, (trace.prompt_tokens + trace.output_tokens).max() - 2

    @cache
    def least(row: int) -> float:
        if row >= end:
            return 0.0
        context = np.clip(((prompt + row - start - 1) // 16 + 0.5) * 16, low, high)
        seconds = []
        for part, own in zip(trace.parts, cost.parts, strict=True):
            for k in range(int(part.draft_limit[row]) + 1):
                draft_s = float(own.draft(k, context)) if k else 0.0
                took = draft_s + float(own.verify(k + 1, context)) + own.round_overhead()
                seconds.append(took + least(row + min(k, int(part.match_len[row])) + 1))
        return min(seconds)

    return least(start)


def test_the_oracle_is_the_least_of_all_choices() -> None:
    trace = joined_trace(sequences=3)
    oracle_s = oracle_seconds(PricedTrace(trace, COST), [SWITCH_POLICIES["switch_match"]])
    assert oracle_s.tolist() == pytest.approx([least_by_trying(trace, COST, s) for s in range(3)], rel=1e-12)


def test_no_policy_and_no_single_drafter_is_faster() -> None:
    for seed in range(4):
        priced = PricedTrace(joined_trace(seed=seed), COST)
        assert isinstance(priced.trace, JoinedTrace)
        oracle_s = oracle_seconds(priced, list(SWITCH_POLICIES.values()))
        for kind in SWITCH_POLICIES.values():
            policy: Policy = fit(kind, {"k1": 5, "k2": 3, "k3": 4}, priced.trace, priced.table())
            assert (priced.replay(policy).speculative_s >= oracle_s * (1 - 1e-12)).all(), policy
            regret = predict_policy(priced, policy).oracle_regret
            assert regret >= 0
        for part, cost in zip(priced.trace.parts, COST.parts, strict=True):
            alone = chain_oracle_seconds(part, PricedTrace(part, cost).table())
            assert (alone >= oracle_s * (1 - 1e-12)).all()


def test_tuning_compares_with_the_best_fixed_k_of_any_drafter() -> None:
    trace = joined_trace(sequences=12, drafters=2)
    cost = JoinedCost((ConstantCost(1e-4, 1e-2), ConstantCost(2e-3, 1e-2)))
    train, holdout = PricedTrace(trace.select(range(6)), cost), PricedTrace(trace.select(range(6, 12)), cost)
    result = tune_on(SWITCH_POLICIES["switch_match"], train, holdout, SearchSettings(trials=40, jobs=1))
    best = result.references[BEST_FIXED_K].prediction.policy
    tried = [
        (train.replay(make_policy("one_drafter", {"drafter": n, "k1": k, "k2": k})).seconds.sum(), n, k)
        for n in (1, 2)
        for k in range(1, trace.depth + 1)
    ]
    _, drafter, k = min(tried)
    assert (best.settings["drafter"], best.settings[f"k{drafter}"]) == (drafter, k)
    assert result.best.settings["k3"] == 1 and result.best.settings["floor3"] == 0.0  # of a drafter that is not there
    assert result.as_dict()["oracle_of"] == "drafters and chains"
    tuned_s = train.replay(result.best).seconds.sum()
    assert tuned_s <= train.replay(make_policy("switch_match")).seconds.sum()
