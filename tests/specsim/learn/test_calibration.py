"""Calibrated acceptance probabilities, compared with the distribution that generated the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss

from specsim.acceptance.formulas import reliability
from specsim.io.errors import InputError
from specsim.learn.chain_calibration import calibrate, drafted_tokens, runs_before, verified_tokens
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.estimates.token_probability import FEATURES, SMALLEST, features, interpolate, run_after
from specsim.replaying.replay import replay
from specsim.replaying.rounds import RoundLog
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, build_trace, small_trace

PROB, DEPTH, RUN, PAST = 2, 3, 4, 5  # columns of the features; confidence and entropy come first
METHODS = pytest.mark.parametrize("method", ["platt", "isotonic"])


def overconfident_trace(seed: int, length: int = 12_000, depth: int = 4) -> tuple[Trace, np.ndarray]:
    """A drafter whose confidence has twice the log odds of the true acceptance probability."""
    rng = np.random.default_rng(seed)
    odds = 1.5 * rng.normal(size=(length, depth))
    accept_prob = 1 / (1 + np.exp(-odds))
    trace = build_trace(
        rng,
        rng.random((length, depth)) < accept_prob,
        [length],
        confidence=1 / (1 + np.exp(-2 * odds)),
        vocabulary=100_000,
    )
    return trace, accept_prob


def test_verified_tokens_by_hand() -> None:
    """Match lengths 2 0 1 at D = 3 in an output of 5 tokens: a token is verified if all before it are accepted."""
    hits = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 0]], dtype=bool)
    trace = build_trace(np.random.default_rng(0), hits, [5])
    confidence, accepted = verified_tokens(trace)
    assert accepted.tolist() == [True, True, False, False, True, False, False]  # the last position drafts nothing
    rows = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (3, 0)]
    assert confidence.tolist() == [trace.confidence[row] for row in rows]
    tokens = drafted_tokens(trace)
    assert np.argwhere(tokens.verified).tolist() == [list(row) for row in rows]
    assert tokens.accepted[tokens.verified].tolist() == accepted.tolist()


def test_tokens_after_an_accepted_one() -> None:
    hits = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0], [0, 0, 0]], dtype=bool)
    tokens = drafted_tokens(build_trace(np.random.default_rng(0), hits, [5]))
    inputs, outcome = tokens.followed()
    assert outcome.tolist() == [True, False, False]  # after (0, 0), (0, 1) and (2, 0)
    np.testing.assert_array_equal(inputs, tokens.features[[0, 0, 2], [0, 1, 0]])


def test_features_by_hand() -> None:
    assert features(0.5, 4.0, 0.5, 1, 0.0, 0.0) == (0.0, 2.0, 0.0, 0.0, 0.0, 0.0)
    expected = (math.log(3), 0.0, -math.log(3), math.log(3), math.log(8), -1.5)
    assert features(0.75, 0.0, 0.25, 3, 7.0, -1.5) == pytest.approx(expected)
    assert features(1.0, 0.0, 0.5, 1, 0.0, 0.0)[0] == pytest.approx(-math.log(SMALLEST), rel=1e-5)


def test_features_of_a_round_remember_its_earlier_tokens() -> None:
    trace = small_trace(2)
    tokens = drafted_tokens(trace)
    assert tokens.features.shape == (len(trace.token), trace.depth, FEATURES)
    expected = np.cumsum(np.log(trace.confidence.astype(float)), axis=1)[:, :-1]
    np.testing.assert_allclose(tokens.features[:, 1:, PAST], expected, rtol=1e-12)
    assert not tokens.features[:, 0, PAST].any() and not tokens.features[:, :, RUN].any()


def test_runs_are_those_of_the_log() -> None:
    """Sequence 0: 2 of 2 accepted, 1 of 1, 0 of 3, 1 of 1; sequence 1 starts at 0."""
    rounds = [[0, 0, 2, 2], [0, 3, 1, 1], [0, 5, 3, 0], [0, 6, 1, 1], [1, 0, 2, 1], [1, 2, 1, 1]]
    log = RoundLog.zeros(len(rounds))
    log.sequence[:], log.t[:], log.drafted[:], log.accepted[:] = np.array(rounds).T
    assert runs_before(log.arrays).tolist() == [0, 3, 5, 0, 0, 0]
    assert run_after(5.0, 3, 0) == 0 and run_after(5.0, 3, 3) == 9
    trace = small_trace()
    replayed = replay(trace, FixedK(k=3), cost_table(trace, RampCost()), log=True).rounds
    tokens = drafted_tokens(trace, replayed)
    np.testing.assert_allclose(np.expm1(tokens.features[:, 0, RUN]), runs_before(replayed.arrays), atol=1e-12)


def test_interpolation_is_numpys() -> None:
    knots, values = np.array([-1.0, 0.0, 2.0, 2.5]), np.array([0.1, 0.4, 0.5, 0.9])
    for x in np.linspace(-3, 4, 141):
        assert interpolate.py_func(x, knots, values) == pytest.approx(np.interp(x, knots, values), abs=1e-15)


@METHODS
def test_the_true_probability_is_recovered(method: str) -> None:
    """Logistic with half the log odds of confidence: both methods are within 0.02 on average."""
    train, _ = overconfident_trace(0)
    holdout, accept_prob = overconfident_trace(1)
    training, tokens = drafted_tokens(train), drafted_tokens(holdout)
    inputs, accepted = training.features[training.verified], training.accepted[training.verified]
    model = calibrate(inputs, accepted, signal="both", method=method)  # `prob` is the square of confidence here
    predicted = model.prob(tokens.features)[tokens.verified]
    assert np.abs(predicted - accept_prob[tokens.verified]).mean() < 0.02
    if method == "platt":
        assert model.weights[1] == pytest.approx(0.5, abs=0.03)
        assert np.abs(model.weights[[2, 1 + RUN, 1 + PAST]]).max() < 0.05  # the others are uninformative


@METHODS
@pytest.mark.parametrize("signal", ["confidence", "both", "all"])
def test_calibration_improves_held_out_error_and_loss(method: str, signal: str) -> None:
    train, holdout = overconfident_trace(0)[0], overconfident_trace(1)[0]
    training, tokens = drafted_tokens(train), drafted_tokens(holdout)
    model = calibrate(
        training.features[training.verified], training.accepted[training.verified], signal=signal, method=method
    )
    accepted = tokens.accepted[tokens.verified]
    raw, calibrated = holdout.confidence[tokens.verified], model.prob(tokens.features[tokens.verified])
    assert reliability(raw, accepted).ece > 0.05 > 0.02 > reliability(calibrated, accepted).ece
    assert log_loss(accepted, calibrated) < log_loss(accepted, raw) - 0.03


def test_a_signal_hides_the_other_ones_features() -> None:
    tokens = drafted_tokens(overconfident_trace(0, 500)[0])
    inputs, accepted = tokens.features[tokens.verified], tokens.accepted[tokens.verified]
    assert calibrate(inputs, accepted, signal="confidence").weights[[2, 1 + PROB]].tolist() == [0, 0]
    assert calibrate(inputs, accepted, signal="entropy").weights[[1, 1 + PROB, 1 + PAST]].tolist() == [0, 0, 0]
    both = calibrate(inputs, accepted, signal="both").weights
    assert both[[1, 2]].all() and both[1 + PROB] == 0
    assert calibrate(inputs, accepted, signal="all").weights[1 + PROB] != 0


@METHODS
def test_a_calibrated_probability_rises_with_the_score_inside_zero_and_one(method: str) -> None:
    tokens = drafted_tokens(overconfident_trace(3, 800)[0])
    model = calibrate(tokens.features[tokens.verified], tokens.accepted[tokens.verified], method=method)
    assert (np.diff(model.knots) > 0).all() and (np.diff(model.probs) >= 0).all()
    assert model.probs[0] > 0 and model.probs[-1] < 1 and 2 <= len(model.knots) <= 65


@METHODS
@pytest.mark.parametrize("outcome", [True, False])
def test_one_outcome_gives_a_constant_short_of_certainty(method: str, outcome: bool) -> None:
    inputs = drafted_tokens(small_trace()).features[:20, 0]
    prob = calibrate(inputs, np.full(20, outcome), method=method).prob(inputs)
    expected = 21 / 22 if outcome else 1 / 22
    assert np.ptp(prob) == 0
    assert prob[0] == pytest.approx(expected if method == "platt" else (0.999 if outcome else 0.001), abs=1e-3)


def test_features_that_never_vary_are_left_out() -> None:
    inputs, accepted = np.ones((40, FEATURES)), np.arange(40) % 4 > 0
    model = calibrate(inputs, accepted)
    assert model.weights[1:].tolist() == [0] * FEATURES
    assert model.prob(inputs)[0] == pytest.approx(0.75, abs=1e-3)


def test_calibration_without_a_verified_token_is_refused() -> None:
    with pytest.raises(InputError, match="no drafted token was verified"):
        calibrate(np.zeros((0, FEATURES)), np.zeros(0, dtype=bool))
