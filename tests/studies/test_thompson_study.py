"""The study of Thompson sampling: its synthetic prompts, its bounds in hindsight, its costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.priced import PricedTrace
from studies.common import smollm2_costs
from studies.thompson import gains
from studies.thompson.gains import PerPrompt

CONFIG: dict[str, Any] = {"trials": 3, "replay_seeds": 3, "keeps": [0.3, 0.7], "seed": 0, "threads": 1}


def priced(model: IID | PerPrompt, seed: int, sequences: int = 12, tokens: int = 80) -> PricedTrace:
    return PricedTrace(generate(model, sequences, tokens, 6, seed), ConstantCost(1.0, 20.0))


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 0.4])
def test_prompts_of_any_spread_accept_alike_in_the_mean(spread: float) -> None:
    probability = PerPrompt(0.7, spread).probabilities(2000)
    assert probability.mean() == pytest.approx(0.7, abs=1e-3)
    assert probability.std() == pytest.approx(spread, abs=2e-3)
    assert ((probability >= 0) & (probability <= 1)).all()


def test_a_spread_that_no_beta_distribution_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"no Beta distribution has mean 0.5 and spread 0.5; choose less spread"):
        PerPrompt(0.5, 0.5)


def test_each_prompt_accepts_with_its_own_probability() -> None:
    model = PerPrompt(0.6, 0.25)
    trace = generate(model, 40, 3000, 4)
    assert np.sort(gains.accepted_shares(trace)) == pytest.approx(model.probabilities(40), abs=0.04)
    fitted = PerPrompt.fit(trace)
    assert (fitted.mean, fitted.spread) == pytest.approx((0.6, 0.25), abs=0.02)


@pytest.mark.parametrize("keep", [0.2, 0.8])
def test_geometric_lengths_have_their_mean_whatever_is_accepted(keep: float) -> None:
    for alpha in (0.3, 0.9):
        played = priced(IID(alpha), 0, tokens=2000).replay(gains.geometric(keep, 6))
        mean = played.drafted.sum() / played.num_rounds.sum()
        assert mean == pytest.approx((1 - keep**6) / (1 - keep), rel=0.03)


def test_hindsight_bounds_what_is_chosen_once_for_all_prompts() -> None:
    train, held = (priced(PerPrompt(0.7, 0.3), seed) for seed in (0, 1))
    taken, best_k = gains.times(train, held, CONFIG)
    for each, once in ((gains.FIXED_EACH, gains.FIXED), (gains.DRAWN_EACH, gains.DRAWN)):
        assert (taken[each] <= taken[once]).all()
        assert taken[each].sum() < taken[once].sum()
    seconds = [train.replay(FixedK(k)).speculative_s.sum() for k in range(1, 7)]
    assert min(seconds) == seconds[best_k - 1]
    document = gains.comparison(train, held, CONFIG)
    ratio = taken[gains.FIXED].sum() / taken[gains.DRAWN].sum()
    assert document["gains"][gains.DRAWN]["estimate"] == pytest.approx(100 * (ratio - 1))
    assert document["speedup"]["estimate"] == pytest.approx(held.baseline_s.sum() / taken[gains.FIXED].sum())
    assert gains.CALI not in document["gains"]  # the confidence of synthetic prompts says nothing


def test_a_spread_is_passed_only_if_all_larger_ones_are() -> None:
    above, below = {"low": 1.0}, {"low": -0.5}
    assert gains.passes_from([(0.1, below), (0.2, above), (0.3, above)]) == 0.2
    assert gains.passes_from([(0.1, above), (0.2, below), (0.3, above)]) == 0.3
    assert gains.passes_from([(0.1, above), (0.2, below)]) is None


def test_contexts_beyond_the_measured_ones_take_the_times_of_the_nearest() -> None:
    cost, document = smollm2_costs()
    assert isinstance(cost, ProfileCost) and document["drafter"] == "smollm2/eagle"
    low, high = cost.contexts[0], cost.contexts[-1]
    asked = np.array([1, low, high, 10 * high])
    for times in (cost.verify(3, asked), cost.draft(2, asked), cost.autoregressive_step(asked)):
        assert times[0] == times[1] != times[2] == times[3]
