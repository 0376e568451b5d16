"""The difficulty model: known parameters are recovered, and its traces can replace those of other processes."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from scipy.special import ndtr

from specsim.acceptance.difficulty import KNOTS, MISSING, Difficulty, Drift, fit_drift, fit_hidden, log_likelihood
from specsim.acceptance.formulas import reliability
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID, PerPosition
from specsim.acceptance.sources import Rounds
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.acceptance_examples import COST, as_counters, difficulty, fixed_k_rounds, softmax_text
from tests.support.goodness import fit_report, summary
from tests.support.reference import small_trace


@cache
def text_trace() -> Trace:
    return softmax_text(1)


@cache
def fitted() -> Difficulty:
    return Difficulty.fit(text_trace())


@cache
def known_trace() -> Trace:
    return generate(difficulty(), 200, 100, 8, seed=7)


@cache
def refitted() -> Difficulty:
    return Difficulty.fit(known_trace())


def speedup(trace: Trace, policy: ChainPolicy) -> float:
    return replay(trace, policy, cost_table(trace, COST)).speedup


def test_a_drift_has_its_stated_autocorrelation() -> None:
    """On 2000 sequences of 60, at lags up to 20; every position is standard normal."""
    drift = Drift(sequence=0.2, local=0.5, decay=0.8)
    x = drift.draw(np.full(2000, 60), np.random.default_rng(0)).reshape(2000, 60)
    assert x.mean() == pytest.approx(0, abs=0.06) and x.var() == pytest.approx(1, abs=0.04)
    for lag in (1, 2, 5, 20):
        assert (x[:, lag:] * x[:, :-lag]).mean() == pytest.approx(0.2 + 0.5 * 0.8**lag, abs=0.03)
    assert fit_drift(x.ravel(), np.full(2000, 60)) == pytest.approx(drift, abs=0.04)


def test_the_likelihood_is_that_of_hits_and_misses() -> None:
    """Exact for independent tokens; for two tokens compared with the orthant of a bivariate normal distribution.

    That distribution is continuous and the chain's is binomial: 15 states have an error of up to 0.5 %.
    """
    rng = np.random.default_rng(1)
    offset = rng.normal(size=(3, 5))
    accepted = (rng.random((3, 5)) < 0.6).astype(np.int8)
    accepted[0, 2] = MISSING
    seen = accepted != MISSING
    alone = np.log(ndtr(np.where(accepted == 1, 1, -1) * offset))[seen].sum()
    assert log_likelihood(Drift(0, 0, 0), offset, accepted) == pytest.approx(alone, rel=1e-9)
    pair = np.zeros((1, 2))
    for drift in (Drift(0.5, 0, 0), Drift(0, 0.6, 0.9), Drift(0.2, 0.3, 0.5)):
        r = drift.sequence + drift.local * drift.decay
        orthant = 0.25 + np.arcsin(r) / (2 * np.pi)
        both = log_likelihood(drift, pair, np.ones((1, 2), dtype=np.int8))
        assert both == pytest.approx(np.log(orthant), rel=5e-3)


def test_hidden_drift_is_recovered_from_hits_with_gaps() -> None:
    drift = Drift(0.25, 0.35, 0.9)
    rng = np.random.default_rng(2)
    offset = rng.normal(0.4, 0.5, size=(150, 100))
    accepted = (offset + drift.draw(np.full(150, 100), rng).reshape(150, 100) > 0).astype(np.int8)
    accepted[rng.random(accepted.shape) < 0.2] = MISSING
    fitted = fit_hidden(offset, accepted)
    assert fitted.sequence == pytest.approx(0.25, abs=0.12)
    assert fitted.sequence + fitted.local == pytest.approx(0.6, abs=0.12)
    assert fitted.decay == pytest.approx(0.9, abs=0.06)


def test_independent_hits_show_no_hidden_drift() -> None:
    accepted = (np.random.default_rng(3).random((60, 100)) < 0.7).astype(np.int8)
    fitted = fit_hidden(np.full(accepted.shape, 0.524), accepted)
    assert fitted.sequence + fitted.local < 0.05


def test_known_parameters_are_recovered_from_a_dense_trace() -> None:
    """20,000 tokens of 200 sequences: tables in their middle, correlations, drifts."""
    truth, fit = difficulty(), refitted()
    middle = np.abs(KNOTS) <= 1.5
    for name in ("on_confidence", "on_ratio", "hit_prob", "off_confidence"):
        np.testing.assert_allclose(
            np.array(getattr(fit, name))[middle], np.array(getattr(truth, name))[middle], atol=0.05
        )
    assert fit.on_correlation == pytest.approx(truth.on_correlation, abs=0.05)
    assert fit.feature_drift == pytest.approx(truth.feature_drift, abs=0.1)
    assert sum(fit.hidden_drift[:2]) == pytest.approx(sum(truth.hidden_drift[:2]), abs=0.12)
    assert fit.hidden_drift[2] == pytest.approx(truth.hidden_drift[2], abs=0.08)
    assert fit.off_follow == pytest.approx(truth.off_follow, abs=0.08)
    assert fit.off_common == pytest.approx(truth.off_common, abs=0.08)


def test_a_refitted_model_s_traces_look_like_the_model_s() -> None:
    """Match lengths, autocorrelation, calibration and features differ by at most twice the noise of a trace."""
    report = fit_report(refitted(), known_trace(), replicates=12)
    assert report.total_variation <= 2 * report.total_variation_noise
    for statistic in report.statistics:
        assert abs(statistic.observed - statistic.model) <= statistic.high - statistic.low, statistic


def test_generated_confidence_is_as_calibrated_as_the_model_says() -> None:
    """ECE on first tokens from the model's tables, compared with that of a trace."""
    model, trace = difficulty(), generate(difficulty(), 2000, 100, 1, seed=8)
    accept_prob, confidence = np.array(model.hit_prob), np.array(model.on_confidence)
    weight = np.exp(-(KNOTS**2) / 2) / np.exp(-(KNOTS**2) / 2).sum()
    accepted = trace.match_len > 0
    assert accepted.mean() == pytest.approx((weight * accept_prob).sum(), abs=0.01)
    assert reliability(trace.confidence[:, 0], accepted).ece == pytest.approx(
        (weight * (confidence - accept_prob)).sum(), abs=0.01
    )


@pytest.mark.parametrize(
    "policy",
    [
        FixedK(k=1),
        FixedK(k=2),
        FixedK(k=4),
        FixedK(k=8),
        MaxConfidence(lambda0=0.4, dynamic=False, max_draft_tokens=8),
        MaxConfidence(lambda0=0.6, dynamic=True, max_draft_tokens=8),
        AdaEDL(gamma=0.2, lambda0=0.4, dynamic=False, max_draft_tokens=8),
        AdaEDL(gamma=0.2, lambda0=0.3, dynamic=True, max_draft_tokens=8),
    ],
    ids=str,
)
def test_speedups_on_synthetic_traces_are_those_on_the_text_fitted_to(policy: ChainPolicy) -> None:
    """A text from another process (softmax features, acceptance that depends on earlier tokens): within 3 %."""
    synthetic = generate(fitted(), 600, 150, 8, seed=9)
    assert speedup(synthetic, policy) == pytest.approx(speedup(text_trace(), policy), rel=0.03)


def test_it_represents_what_simpler_models_cannot() -> None:
    """Match lengths of neighbouring rounds, acceptance that differs by sequence, and adaptive policies."""
    observed = summary(text_trace())
    policy = AdaEDL(gamma=0.2, lambda0=0.4, dynamic=False, max_draft_tokens=8)
    errors, spreads = [], []
    for model in (fitted(), IID.fit(text_trace()), PerPosition.fit(text_trace())):
        trace = generate(model, 600, 150, 8, seed=10)
        errors.append(abs(speedup(trace, policy) / speedup(text_trace(), policy) - 1))
        spreads.append(summary(trace)["spread of acceptance over sequences"])
    assert errors[0] < 0.03 < 0.1 < min(errors[1:])
    spread = observed["spread of acceptance over sequences"]
    assert spreads[0] == pytest.approx(spread, rel=0.25)
    assert max(spreads[1:]) < 0.6 * spread


def test_over_dispersion_is_found_in_rounds() -> None:
    """Rounds of K = 4 of the default joint distribution: the latent's strength and the speedup at other K."""
    source = generate(difficulty(hidden=(0.3, 0.2, 0.9), features=(0.3, 0.2, 0.9)), 150, 100, 8, seed=11)
    model = Difficulty.fit(fixed_k_rounds(source, 4))
    assert model.feature_drift == model.hidden_drift
    assert sum(model.hidden_drift[:2]) == pytest.approx(0.5, abs=0.15)
    synthetic = generate(model, 600, 100, 8, seed=12)
    for k in (1, 2, 4, 8):
        assert speedup(synthetic, FixedK(k=k)) == pytest.approx(speedup(source, FixedK(k=k)), rel=0.03)
    observed, generated = summary(source), summary(synthetic)
    for name in ("spread of acceptance over sequences", "autocorrelation of match length, lag 8"):
        assert generated[name] == pytest.approx(observed[name], abs=0.06)
    # The default distribution's confidence is calibrated, token by token; 600 sequences leave an error of 0.01.
    assert reliability(synthetic.confidence[:, 0], synthetic.match_len > 0).ece < 0.03


def test_insufficient_data_are_refused() -> None:
    rounds = fixed_k_rounds(small_trace(), 3)
    with pytest.raises(InputError, match="cannot be fitted to counters"):
        Difficulty.fit(as_counters(rounds))
    with pytest.raises(InputError, match="needs 200 output tokens"):
        Difficulty.fit(small_trace())
    with pytest.raises(InputError, match="needs 200 verified tokens"):
        Difficulty.fit(rounds)
    with pytest.raises(InputError, match="needs the columns sequence_id and t"):
        Difficulty.fit(Rounds(rounds.drafted, rounds.accepted))
    with pytest.raises(InputError, match="has 495 with 495 accepted"):
        Difficulty.fit(generate(IID(1.0), 5, 100, 4))


def test_a_drafter_with_uninformative_confidence_can_be_fitted() -> None:
    model = Difficulty.fit(generate(IID(0.7), 20, 60, 1))
    assert np.ptp(model.hit_prob) == 0 and model.hit_prob[0] == pytest.approx(0.7, abs=0.06)
    assert generate(model, 3, 20, 4).depth == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hit_prob": (0.5,)}, "hit_prob needs 57 values"),
        ({"on_confidence": (1.2,) * 57}, "on_confidence needs 57 values in"),
        ({"on_entropy_nats": tuple(range(57, 0, -1))}, "on_entropy_nats must not fall"),
        ({"hidden_drift": (0.7, 0.7, 0.1)}, "shares above 1"),
        ({"hidden_drift": (0.1, 0.1, 1.0)}, "decay of 1"),
        ({"off_follow": 0.9, "off_common": 0.5}, "exceeds 1"),
    ],
)
def test_impossible_parameters_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(difficulty(), **change)


def test_a_perfect_model_passes_its_own_report_and_a_wrong_one_does_not() -> None:
    trace = generate(difficulty(), 40, 80, 6, seed=13)
    right = fit_report(difficulty(), trace, replicates=20)
    wrong = fit_report(IID.fit(trace), trace, replicates=20)
    assert sum(statistic.fits for statistic in right.statistics) >= len(right.statistics) - 3
    assert sum(statistic.fits for statistic in wrong.statistics) <= 3
    assert wrong.total_variation > wrong.total_variation_noise
    assert sum(right.accepted_length) == pytest.approx(1) and len(right.accepted_length) == 7
