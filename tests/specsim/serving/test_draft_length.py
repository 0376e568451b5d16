"""Draft lengths that follow the load."""

from __future__ import annotations

import numpy as np
import pytest

from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.linear import LinearCost, LinearPass
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.costs import round_seconds
from specsim.serving.draft_length import ScheduledK, TurboSpec, fixed_length
from specsim.serving.drafts import Arm, drafts_of
from specsim.serving.lockstep import lockstep
from tests.support.checks import refusal
from tests.support.running import rounds, running

COST = LinearCost(LinearPass(0.006, 2e-5, 4e-8), LinearPass(0.001, 1e-6, 2e-9), step_s=0.001, round_s=0.0002)


def test_a_schedule_is_followed_round_by_round() -> None:
    trace = generate(IID(1.0), sequences=3, output_tokens=[4, 6, 40], depth=4)
    rounds = lockstep(drafts_of(trace, ScheduledK({1: 4, 2: 1, 3: 0})), COST, 3).rounds
    sizes = np.bincount(rounds.batch_round)
    by_size = {size: set(rounds.drafted[sizes[rounds.batch_round] == size].tolist()) for size in (1, 2, 3)}
    assert by_size == {3: {0}, 2: {1}, 1: {4, 3}}  # before the last of 4 tokens, 3 are left to draft


def test_a_drafter_that_rested_takes_in_all_that_was_said_meanwhile() -> None:
    trace = generate(IID(1.0), sequences=2, output_tokens=[5, 20], depth=4)
    rounds = lockstep(drafts_of(trace, ScheduledK({1: 3, 2: 0})), COST, 2).rounds
    longer = rounds.sequence == 1
    # Five tokens singly, then rounds of 3 accepted tokens and a bonus.
    assert rounds.t[longer].tolist() == [0, 1, 2, 3, 4, 5, 9, 13, 17]
    assert rounds.behind[longer].tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1]
    assert rounds.speculates[longer].tolist() == [False] * 5 + [True] * 4


@pytest.mark.parametrize("cached", [100, 40_000])
@pytest.mark.parametrize("sequences", [1, 16, 400])
@pytest.mark.parametrize("accept_prob", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_turbospec_chooses_the_k_of_most_tokens_per_second(accept_prob: float, sequences: int, cached: int) -> None:
    rule = TurboSpec(COST, 6, accept_prob=accept_prob)
    rates = []
    each = np.full(sequences, cached)
    for k in range(7):
        took = round_seconds(COST, each * 0, np.full(sequences, k), each * 0, each, speculates=k > 0)
        rates.append(float(mean_tokens_per_round(accept_prob, k) / took.total_s[0]))
    assert rule.choose(rule.initial_state(), running(each)) == int(np.argmax(rates))


def test_turbospec_learns_and_forgets() -> None:
    rule = TurboSpec(COST, 6, accept_prob=0.6, prior_tokens=10, memory=0.9)
    state = rule.initial_state()
    one, two = running(np.array([100])), running(np.array([50, 50]))
    for _ in range(100):  # 3 accepted of 4 verified; what comes after a rejection was not verified
        state = rule.update(state, one, rounds([5], [3]))
    assert state == pytest.approx((30, 40), rel=1e-3)
    hopeful = rule.choose(state, one)
    for _ in range(100):
        state = rule.update(state, two, rounds([5, 2], [0, 0]))
    assert state == pytest.approx((0, 20), rel=1e-2, abs=1e-2)
    assert rule.choose(state, one) < hopeful
    for _ in range(100):  # at rest
        state = rule.update(state, one, rounds([0], [0]))
    assert rule.choose(state, one) == rule.choose(rule.initial_state(), one)


@pytest.mark.parametrize("accept_prob", [0.5, 0.8])
@pytest.mark.parametrize("batch", [2, 32, 128])
def test_turbospec_comes_close_to_the_best_fixed_k(batch: int, accept_prob: float) -> None:
    trace = generate(IID(accept_prob), sequences=64, output_tokens=60, depth=6, seed=1)
    order = np.arange(max(64, 6 * batch)) % 64

    def tokens_per_s(arm: Arm) -> float:
        full = lockstep(drafts_of(trace, arm), COST, batch, order=order, refill=True).per_sequence(full_only=True)
        return float(full[0].sum() / full[1].sum())

    fixed = [tokens_per_s(arm) for arm in (None, *(FixedK(k=k) for k in range(1, 7)))]
    rate = tokens_per_s(TurboSpec(COST, 6))
    assert 0.98 * max(fixed) < rate < 1.02 * max(fixed)
    assert rate > 1.05 * min(fixed)


def test_settings_that_make_no_sense_are_refused() -> None:
    refusal(lambda: ScheduledK({2: 3}), "batch 1", "1:5,4:3,16:0")
    refusal(lambda: ScheduledK({1: -1}), "0 or more")
    refusal(lambda: TurboSpec(COST, 4, accept_prob=1.5), "accept_prob=1.5")
    refusal(lambda: TurboSpec(COST, 4, memory=1.0), "memory=1.0")
    assert fixed_length(3).max_draft_tokens == 3
