"""RenewalStop and its calibrated probabilities, against brute force and the distributions that generated the data."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from sklearn.metrics import log_loss

from specsim.acceptance.formulas import leviathan_speedup, reliability
from specsim.cost.model import ConstantCost
from specsim.learn.calibration import calibrate, drafted_tokens, runs_before, verified_tokens
from specsim.learn.fit import fit
from specsim.learn.renewal_stop import (
    NEVER,
    RoundCost,
    SignalChain,
    least_time_per_token_s,
    mean_cost,
    myopic_thresholds,
    optimal_thresholds,
    round_surplus_s,
)
from specsim.policy.base import build_policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.policy.chain.time_gain import TimeGain
from specsim.policy.estimates.token_probability import FEATURES, SMALLEST, features, interpolate, run_after
from specsim.replaying.replay import Replay, replay
from specsim.replaying.rounds import RoundLog
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.reference import FlatCost, RampCost, build_trace, small_trace


def of_round(cost: FlatCost, depth: int) -> RoundCost:
    verify = np.array([0.0, *(float(cost.verify(n, 0)) for n in range(1, depth + 2))])
    draft = cost.step_s * np.arange(depth + 1)
    return RoundCost(draft, cost.catch_up_s, verify, cost.ask, cost.overhead, cost.pass_s)


def chain_of(first: list[float], accept: list[float], following: list[list[float]]) -> SignalChain:
    steps, accept_probs = np.array(following), np.array(accept)
    return SignalChain(np.array(first), accept_probs, steps, steps @ accept_probs)


STEADY = chain_of([0.4, 0.4, 0.2], [0.95, 0.7, 0.3], [[0.8, 0.15, 0.05], [0.3, 0.5, 0.2], [0.2, 0.3, 0.5]])
# The second token reveals whether the rest of the round is accepted.
FORK = chain_of([1.0, 0.0, 0.0], [0.9, 0.99, 0.01], [[0.0, 0.35, 0.65], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
COST = FlatCost()


def world(chain: SignalChain, seed: int, *, sequences: int = 40, length: int = 700, depth: int = 6) -> Trace:
    """Rounds that are independent draws of a chain, with the acceptance probability as confidence."""
    rng = np.random.default_rng(seed)
    rows = sequences * length
    bins = np.empty((rows, depth), dtype=int)
    bins[:, 0] = rng.choice(len(chain.first), size=rows, p=chain.first)
    for i in range(1, depth):
        bins[:, i] = (rng.random(rows)[:, None] > np.cumsum(chain.following[bins[:, i - 1]], axis=1)).sum(axis=1)
    accept_prob = chain.accept[bins]
    hits = rng.random(accept_prob.shape) < accept_prob
    return build_trace(
        rng, hits, [length] * sequences, confidence=accept_prob, entropy_nats=1 - accept_prob, vocabulary=100_000
    )


def brute_force_surplus_s(chain: SignalChain, cost: FlatCost, time_per_token_s: float, depth: int) -> float:
    """A round's value x tokens - seconds under optimal stopping, over the whole tree of signals."""

    @cache
    def beyond_s(d: int, b: int, path: float) -> float:
        """The d-th token is drafted, in bin b, and accepted with all before it with probability `path`."""
        if d == depth:
            return -path * cost.catch_up_s
        asked_s = cost.ask if d + 1 < depth else 0.0
        on_s = -cost.step_s - cost.per_token - asked_s
        for c, accept_prob in enumerate(chain.following[b].tolist()):
            if accept_prob:
                then = path * float(chain.accept[c])
                on_s += accept_prob * (time_per_token_s * then + beyond_s(d + 1, c, then))
        return max(-path * cost.catch_up_s, on_s)

    fixed_s = cost.step_s + cost.pass_s + cost.per_token + cost.overhead + (cost.ask if depth > 1 else 0.0)
    total = time_per_token_s - fixed_s
    for b, accept_prob in enumerate(chain.first.tolist()):
        right = float(chain.accept[b])
        total += accept_prob * (time_per_token_s * right + beyond_s(1, b, right))
    return total


def brute_force_time_s(chain: SignalChain, cost: FlatCost, depth: int) -> float:
    return float(brentq(lambda v: brute_force_surplus_s(chain, cost, v, depth), 0.0, 0.1, xtol=1e-12))


def time_per_token_s(result: Replay) -> tuple[float, float]:
    """Mean over sequences of equal length, and its standard error."""
    each = result.speculative_s / result.output_tokens
    return float(each.mean()), float(each.std(ddof=1) / len(each) ** 0.5)


@pytest.mark.parametrize("chain", [STEADY, FORK], ids=["steady", "fork"])
@pytest.mark.parametrize("cost", [COST, FlatCost(step_s=3e-3), FlatCost(per_token=0.0, catch_up_s=0.0, ask=0.0)])
def test_the_fixed_point_is_that_of_brute_force(chain: SignalChain, cost: FlatCost) -> None:
    """The grid over path probabilities has an error of at most 0.1 %."""
    least_s = least_time_per_token_s(chain, of_round(cost, 6), 6)
    assert least_s == pytest.approx(brute_force_time_s(chain, cost, 6), rel=1e-3)
    surplus = [round_surplus_s(chain, of_round(cost, 6), v, 6) for v in (0.9 * least_s, least_s, 1.1 * least_s)]
    assert surplus[0] < 0 < surplus[2] and abs(surplus[1]) < 1e-8
    for v in (0.5 * least_s, least_s, 2 * least_s):
        grid, tree = round_surplus_s(chain, of_round(cost, 6), v, 6), brute_force_surplus_s(chain, cost, v, 6)
        assert grid == pytest.approx(tree, abs=1e-3 * cost.pass_s)


@pytest.mark.parametrize("accept_prob", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("cost_ratio", [0.02, 0.1, 0.3])
def test_on_iid_acceptance_it_is_the_best_fixed_length(accept_prob: float, cost_ratio: float) -> None:
    depth = 16
    chain = chain_of([1.0], [accept_prob], [[1.0]])
    cost = of_round(FlatCost(cost_ratio, 0.0, 1.0, 0.0, 0.0, 0.0), depth)
    lengths = np.arange(1, depth + 1)
    speedups = leviathan_speedup(accept_prob, lengths, cost_ratio)
    least_s = least_time_per_token_s(chain, cost, depth)
    assert least_s == pytest.approx(1 / speedups.max(), rel=1e-3)
    thresholds, _ = optimal_thresholds(chain, cost, least_s, depth)
    on = accept_prob ** lengths[:-1] >= thresholds[:, 0]
    drafted = depth if on.all() else int(on.argmin()) + 1
    assert speedups[drafted - 1] == pytest.approx(speedups.max(), rel=1e-3)


def test_looking_ahead_pays_for_information() -> None:
    """One more token returns 0.9 x 0.35 of a token's value, less than its cost, but reveals all later tokens."""
    expensive, depth = FlatCost(step_s=2.5e-3), 6
    cost = of_round(expensive, depth)
    time_per_token_s = least_time_per_token_s(FORK, cost, depth)
    ahead, _ = optimal_thresholds(FORK, cost, time_per_token_s, depth)
    myopic = myopic_thresholds(FORK, cost, time_per_token_s, depth)
    assert ahead.shape == myopic.shape == (5, 3)
    assert ahead[0, 0] < FORK.accept[0] < myopic[0, 0] < NEVER
    assert (np.minimum(ahead, 1) <= myopic + 1 / 128).all()  # a grid step; no path probability exceeds 1

    train, holdout = world(FORK, 1), world(FORK, 2)
    speedups = {}
    for lookahead in (True, False):
        policy = fit(RenewalStop, {"max_draft_tokens": 6, "lookahead": lookahead}, train, cost_table(train, expensive))
        speedups[lookahead] = replay(holdout, policy, cost_table(holdout, expensive)).speedup
    assert speedups[True] > 1.05 * speedups[False]


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
@pytest.mark.parametrize("chain", [STEADY, FORK], ids=["steady", "fork"])
def test_held_out_time_is_the_minimum(chain: SignalChain, calibration: str) -> None:
    """Within 4 standard errors of brute force, and 1 % for the error of a fit to 28,000 positions."""
    train, holdout = world(chain, 1), world(chain, 2)
    policy = fit(RenewalStop, {"max_draft_tokens": 6, "calibration": calibration}, train, cost_table(train, COST))
    spent_s, error_s = time_per_token_s(replay(holdout, policy, cost_table(holdout, COST)))
    least_s = brute_force_time_s(chain, COST, 6)
    assert error_s < 0.01 * least_s
    assert least_s - 4 * error_s <= spent_s <= 1.01 * least_s + 4 * error_s
    trained_s, _ = time_per_token_s(replay(train, policy, cost_table(train, COST)))
    assert policy.time_per_token_s == pytest.approx(trained_s, rel=0.005)  # the fixed point


def test_no_fixed_length_and_no_threshold_is_faster() -> None:
    train, holdout = world(STEADY, 3), world(STEADY, 4)
    policy = fit(RenewalStop, {"max_draft_tokens": 6}, train, cost_table(train, COST))
    table = cost_table(holdout, COST)
    result = replay(holdout, policy, table)
    rivals = [FixedK(k=k) for k in range(1, 7)]
    levels = [0.1, 0.25, 0.35, 0.5, 0.65, 0.75, 0.9, 0.97]
    rivals += [MaxConfidence(lambda0=x, dynamic=False, max_draft_tokens=6) for x in levels]
    rivals += [TimeGain(cost_ratio=x, max_draft_tokens=6) for x in levels]
    for rival in rivals:
        difference_s = replay(holdout, rival, table).speculative_s - result.speculative_s
        error_s = difference_s.std(ddof=1) / len(difference_s) ** 0.5
        assert difference_s.mean() >= -2 * error_s, rival


def test_a_run_of_accepted_tokens_counts_where_text_is_easy_in_stretches() -> None:
    """Confidence is uninformative; stretches of 60 tokens are easy or hard, and no fixed length fits both."""
    rng = np.random.default_rng(0)

    def stretches() -> Trace:
        easy = rng.random(500) < 0.5
        accept_prob = np.repeat(np.where(easy, 0.97, 0.3), 60)[:, None] * np.ones(8)
        hits = rng.random(accept_prob.shape) < accept_prob
        flat = np.full(accept_prob.shape, 0.5)
        return build_trace(rng, hits, [1000] * 30, confidence=flat, entropy_nats=flat, vocabulary=100_000)

    train, holdout = stretches(), stretches()
    policy = fit(RenewalStop, {"max_draft_tokens": 8}, train, cost_table(train, COST))
    table = cost_table(holdout, COST)
    assert policy.weights[5] > 0
    best = max(replay(holdout, FixedK(k=k), table).speedup for k in range(1, 9))
    assert replay(holdout, policy, table).speedup > 1.05 * best


@pytest.fixture(scope="module")
def fitted() -> RenewalStop:
    trace = small_trace()
    return fit(RenewalStop, {"max_draft_tokens": 6}, trace, cost_table(trace, RampCost()))


def test_a_fitted_policy_survives_json(fitted: RenewalStop) -> None:
    settings = json.loads(json.dumps(fitted.settings))
    assert build_policy(RenewalStop, settings) == fitted
    nothing: Any = None
    assert fit(RenewalStop, settings, nothing, nothing) == fitted  # is not fitted again
    assert len(fitted.thresholds) == 5 * (len(fitted.edges) + 1) and fitted.time_per_token_s > 0


def test_without_data_it_thresholds_a_rough_path_probability() -> None:
    """Log odds 0.55 + 0.37 of confidence's - 0.24 sqrt(entropy) + 0.11 of the token's own.

    The knots bend the curve by 1e-3 at most.
    """
    trace = small_trace(1)
    confidence, entropy = trace.confidence.astype(float), trace.entropy_nats.astype(float)
    prob = trace.prob.astype(float)
    odds = 0.55 + 0.37 * np.log(confidence / (1 - confidence)) - 0.24 * np.sqrt(entropy)
    odds += 0.11 * np.log(prob / (1 - prob))
    path = np.cumprod(1 / (1 + np.exp(-odds)), axis=1)
    log = replay(trace, RenewalStop(max_draft_tokens=6), cost_table(trace, RampCost()), log=True).rounds
    rows = trace.offsets[log.sequence] + log.t
    clear = np.abs(path[rows] - 0.4).min(axis=1) > 2e-3  # rounds that do not depend on the knots
    stopped = np.append(path[rows, :5] < 0.4, np.ones((len(rows), 1), dtype=bool), axis=1).argmax(axis=1) + 1
    expected = np.minimum(stopped, trace.draft_limit[rows])
    assert clear.sum() >= 0.9 * len(rows) >= 20
    np.testing.assert_array_equal(log.drafted[clear], expected[clear])
    assert RenewalStop().weights[5] == 0


@pytest.mark.parametrize(("lookahead", "signal"), [*itertools.product([True, False], ["confidence", "entropy"])])
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_traces_with_one_outcome_can_be_fitted(lookahead: bool, signal: str, rate: float) -> None:
    """All rejected: a token a round. All accepted: to the limit."""
    rng = np.random.default_rng(0)
    trace = build_trace(rng, rng.random((200, 5)) < rate, [100, 100])
    settings = {"lookahead": lookahead, "signal": signal, "max_draft_tokens": 5}
    policy = fit(RenewalStop, settings, trace, cost_table(trace, COST))
    log = replay(trace, policy, cost_table(trace, COST), log=True).rounds
    whole = log[log.t < 94]  # the budget shortens the drafts after it
    assert set(whole.drafted.tolist()) == ({1} if rate == 0 else {5})


def test_a_draft_of_one_token_leaves_nothing_to_decide() -> None:
    trace = small_trace()
    table = cost_table(trace, RampCost())
    policy = fit(RenewalStop, {"max_draft_tokens": 1}, trace, table)
    assert replay(trace, policy, table).speedup == replay(trace, FixedK(k=1), table).speedup


def test_a_larger_value_drafts_longer() -> None:
    trace = world(STEADY, 5, sequences=10)
    table = cost_table(trace, COST)
    drafted = [
        replay(trace, fit(RenewalStop, {"max_draft_tokens": 6, "value_scale": x}, trace, table), table).drafted.sum()
        for x in (0.3, 1.0, 3.0)
    ]
    assert drafted[0] < drafted[1] < drafted[2]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"weights": (1.0, 2.0)}, "weights has to hold 7 numbers"),
        ({"probs": (0.5, 0.6, 0.7)}, "probs has to hold as many numbers as knots"),
        ({"knots": tuple(range(64, -1, -1))}, "knots has to hold increasing"),
        ({"edges": (1.0, 0.0), "thresholds": (0.1, 0.2, 0.3)}, "edges has to hold increasing"),
        ({"thresholds": (0.1, 0.2, 0.3)}, "thresholds has to hold a number per depth and bin"),
    ],
)
def test_tables_that_do_not_fit_each_other_are_refused(settings: dict[str, Any], complaint: str) -> None:
    refusal(lambda: RenewalStop(**settings), match=complaint)


def test_mean_costs_weigh_contexts_by_positions() -> None:
    """With costs linear in context, the mean over positions is the cost at the mean bucket."""
    trace = replace(small_trace(), meta={**small_trace().meta})
    table = cost_table(trace, RampCost())
    context = np.concatenate(
        [p - 1 + np.arange(n) for p, n in zip(trace.prompt_tokens, trace.output_tokens, strict=True)]
    )
    cost = mean_cost(trace, table)
    buckets = context >> table.bucket_bits
    np.testing.assert_allclose(cost.draft_s, table.draft_s[:, buckets].mean(axis=1))
    np.testing.assert_allclose(cost.verify_s[1:], table.verify_s[1:, buckets].mean(axis=1))
    assert cost.autoregressive_s == pytest.approx(table.autoregressive_s[buckets].mean())


def test_costs_of_zero_are_refused() -> None:
    free = of_round(FlatCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 3)
    refusal(lambda: least_time_per_token_s(STEADY, free, 3), "rounds of 0 seconds")
    trace = small_trace()
    refusal(lambda: fit(RenewalStop, {}, trace, cost_table(trace, ConstantCost(1e-3, 1e-2))), "drafts up to 16 tokens")


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
    refusal(lambda: calibrate(np.zeros((0, FEATURES)), np.zeros(0, dtype=bool)), "no drafted token was verified")
