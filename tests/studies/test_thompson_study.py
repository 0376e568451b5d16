"""The study of Thompson sampling: its synthetic prompts, its bounds in hindsight."""

from __future__ import annotations

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.iid import IID
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate
from specsim.replaying.priced import PricedTrace
from studies.common import Document
from studies.thompson import gains
from studies.thompson.gains import PerPrompt

CONFIG = {
    "target": "lab-deep", "prompts": 12, "max_new_tokens": 80, "tuning_share": 0.5, "cost_ratio": 0.05, "trials": 3,
    "replay_seeds": 3, "keeps": [0.3, 0.7], "extreme_share": 0.25, "seed": 0, "threads": 1,
    "synthetic": {"run": "T08", "prompts": 12, "spreads": [0.0, 0.3]},
}  # fmt: skip


def priced(model: IID | PerPrompt, seed: int, sequences: int = 12, tokens: int = 80) -> PricedTrace:
    return PricedTrace(generate(model, sequences, tokens, 6, seed), ConstantCost(1.0, 20.0))


@pytest.fixture(scope="module")
def document() -> Document:
    return gains.comparison(priced(PerPrompt(0.7, 0.3), 0), priced(PerPrompt(0.7, 0.3), 1), CONFIG)


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


def test_extremes_are_the_least_and_the_most_accepting_prompts() -> None:
    trace = generate(PerPrompt(0.6, 0.25), 16, 400, 4)
    chosen = gains.extremes(trace, 0.25)
    order = np.argsort(gains.accepted_shares(trace))
    assert sorted(chosen.tolist()) == sorted([*order[:4], *order[-4:]])


@pytest.mark.parametrize("keep", [0.2, 0.8])
def test_geometric_lengths_have_their_mean_whatever_is_accepted(keep: float) -> None:
    for alpha in (0.3, 0.9):
        played = priced(IID(alpha), 0, tokens=2000).replay(gains.geometric(keep, 6))
        mean = played.drafted.sum() / played.num_rounds.sum()
        assert mean == pytest.approx((1 - keep**6) / (1 - keep), rel=0.03)


def test_hindsight_bounds_what_is_chosen_once_for_all_prompts(document: Document) -> None:
    rows = gains.rows_of(document)
    for each, once in ((gains.FIXED_EACH, gains.FIXED), (gains.DRAWN_EACH, gains.DRAWN)):
        assert (np.array(rows[each]["seconds"]) <= np.array(rows[once]["seconds"])).all()
        assert sum(rows[each]["seconds"]) < sum(rows[once]["seconds"])
    assert gains.gain(document, gains.FIXED) == Estimate(0.0, 0.0, 0.0)
    gain = gains.gain(document, gains.DRAWN)
    ratio = sum(rows[gains.FIXED]["seconds"]) / sum(rows[gains.DRAWN]["seconds"])
    assert gain.estimate == pytest.approx(100 * (ratio - 1))
    assert gains.CALI not in rows and gains.gain(document, gains.CALI) is None  # synthetic prompts have no scores


def test_a_spread_is_passed_only_if_all_larger_ones_are() -> None:
    above, below = Estimate(2.0, 1.0, 3.0), Estimate(0.5, -0.5, 1.5)
    assert gains.passes_from([(0.1, below), (0.2, above), (0.3, above)]) == 0.2
    assert gains.passes_from([(0.1, above), (0.2, below), (0.3, above)]) == 0.3
    assert gains.passes_from([(0.1, above), (0.2, below)]) is None
