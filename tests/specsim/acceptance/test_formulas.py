"""Replay against closed formulas, where the formulas' assumptions hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specsim.acceptance.difficulty import Difficulty
from specsim.acceptance.formulas import eq14_speedup, leviathan_speedup, mean_tokens_per_round
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID, PerPosition
from specsim.cost.model import ConstantCost
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.time_gain import TimeGain
from specsim.replaying.prediction import summarise
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import small_trace

COST = ConstantCost(s_d=2e-3, s_t=17e-3)
ROUNDS = 40_000  # of every cell of the grid


def run(trace: Trace, policy: ChainPolicy, *, log: bool = False) -> Replay:
    return replay(trace, policy, cost_table(trace, COST), log=log)


def whole_rounds(trace: Trace, k: int) -> np.ndarray:
    """Accepted tokens of the rounds that could draft k tokens: those before the sequence's last k + 1 positions.

    Which rounds these are depends on where they begin, not on how they end, so their distribution is
    that of a round in an endless text.
    """
    log = run(trace, FixedK(k=k), log=True).rounds
    left = trace.output_tokens[log.sequence] - log.t
    counted = log[left > k]
    assert (counted.drafted == k).all()
    return counted.accepted


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.4, 0.6, 0.8, 0.9, 0.95, 1.0])
def test_fixed_k_emits_as_many_tokens_per_round_as_leviathan_says(alpha: float) -> None:
    """Eq. 1, (1 - a^(K+1)) / (1 - a), within 4 standard errors of the mean over some 40,000 rounds."""
    longest = 12
    lengths = np.full(4, round(ROUNDS / 4 * mean_tokens_per_round(alpha, longest)))
    trace = generate(IID(alpha), 4, lengths, longest, seed=11)
    for k in (1, 2, 3, 5, 8, 12):
        emitted = whole_rounds(trace, k) + 1
        assert len(emitted) > 0.9 * ROUNDS
        expected = float(mean_tokens_per_round(alpha, k))
        error = emitted.std() / np.sqrt(len(emitted))
        assert abs(emitted.mean() - expected) <= 4 * error + 1e-12, (k, emitted.mean(), expected)


def test_that_test_has_the_power_to_see_one_percent() -> None:
    """Acceptance off by 0.01 moves the mean by far more than 4 standard errors."""
    trace = generate(IID(0.79), 4, ROUNDS, 8, seed=12)
    emitted = whole_rounds(trace, 8) + 1
    error = emitted.std() / np.sqrt(len(emitted))
    assert abs(emitted.mean() - float(mean_tokens_per_round(0.8, 8))) > 4 * error


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_leviathan_s_speedup_in_expectation(alpha: float, k: int) -> None:
    """Theorem 3.8, over sequences long enough that their ends, at most K tokens, do not count.

    The tolerance is 4 standard errors of the sequences' mean, plus K tokens' share.
    """
    tokens = 4_000
    result = run(generate(IID(alpha), 30, tokens, k, seed=13), FixedK(k=k))
    speedups = result.autoregressive_s / result.speculative_s
    expected = float(leviathan_speedup(alpha, k, COST.s_d / COST.s_t))
    tolerance = 4 * speedups.std() / np.sqrt(len(speedups)) + expected * k / tokens
    assert speedups.mean() == pytest.approx(expected, abs=tolerance)


@cache
def difficult(seed: int) -> Trace:
    """A trace of a difficulty model fitted to another trace."""
    rng = np.random.default_rng(seed)
    trace = small_trace(seed)
    source = generate(PerPosition(tuple(rng.uniform(0.5, 0.9, 6))), 10, 60, trace.depth, seed)
    return generate(Difficulty.fit(source), 12, rng.integers(1, 90, 12), 6, seed)


def filled(trace: Trace) -> Trace:
    """The trace as if its outputs had ended by their budget and no token ended a text."""
    return replace(trace, meta={**trace.meta, "eos_token_id": None}, budget_tokens=trace.output_tokens)


TRACES = {
    "recorded": lambda: filled(small_trace(3)),
    "iid": lambda: generate(IID(0.75), 7, [1, 2, 9, 40, 100, 3, 64], 8, seed=1),
    "nothing accepted": lambda: generate(IID(0.0), 3, 20, 6, seed=2),
    "everything accepted": lambda: generate(IID(1.0), 3, 20, 6, seed=2),
    "difficulty": lambda: difficult(4),
}
CHAIN = [
    FixedK(k=1),
    FixedK(k=6),
    MaxConfidence(lambda0=0.6, max_draft_tokens=6),
    AdaEDL(gamma=0.3, lambda0=0.2, max_draft_tokens=5),
    TimeGain(max_draft_tokens=6),
]


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", CHAIN, ids=str)
def test_eq14_is_the_replayed_speedup_under_its_own_assumptions(name: str, policy: ChainPolicy) -> None:
    """Constant s_d and s_t, nothing else costs: EESD Eq. 13 and Eq. 14, whatever the trace and the policy."""
    trace = TRACES[name]()
    result = run(trace, policy)
    summary = summarise(result)
    time_s = summary.drafted * COST.s_d + summary.rounds * COST.s_t
    assert summary.seconds == pytest.approx(time_s, rel=1e-12)
    assert summary.ar_seconds == pytest.approx(summary.output_tokens * COST.s_t, rel=1e-12)
    assert summary.output_tokens == summary.accepted + summary.rounds
    if summary.accepted:
        predicted = float(eq14_speedup(summary.v_d, summary.r_d, COST.s_d / COST.s_t))
        assert summary.speedup.estimate == pytest.approx(predicted, rel=1e-12)


def test_an_accepted_end_token_leaves_no_room_for_the_target_s_own() -> None:
    """Eq. 14 takes every round to emit a + 1 tokens: it misses by the rounds that accept the end. Eq. 13 does not."""
    trace = small_trace(3)
    result = run(trace, FixedK(k=6), log=True)
    rounds = result.rounds
    ends_inside = int((rounds.t + rounds.accepted == trace.output_tokens[rounds.sequence]).sum())
    summary = summarise(result)
    assert ends_inside > 0
    assert summary.output_tokens == summary.accepted + summary.rounds - ends_inside
    assert summary.seconds == pytest.approx(summary.drafted * COST.s_d + summary.rounds * COST.s_t, rel=1e-12)


def test_eq14_knows_no_draft_that_is_all_rejected() -> None:
    """v_d = r_d = 0 leaves 0 / 0: there Eq. 14 answers 1, as if nothing had been drafted, while Eq. 13 has it right."""
    summary = summarise(run(TRACES["nothing accepted"](), FixedK(k=3)))
    assert summary.v_d == summary.r_d == 0 and summary.drafted > 0
    assert float(eq14_speedup(summary.v_d, summary.r_d, 0.1)) == 1.0
    assert summary.speedup.estimate < 0.8
