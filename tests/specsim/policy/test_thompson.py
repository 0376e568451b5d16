"""Beta-TS and Cali-TS: Algorithms 2 and 3 by hand, in distribution with theta really drawn, and in the long run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import mul
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats

from specsim.cost.model import ConstantCost
from specsim.io.rng import split, uniform
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS, clamped_mean, posterior, threshold
from specsim.policy.estimates.counts import count_round
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, build_trace, small_trace

OPTIONS = list(product(("exact", "printed"), ("per_token", "per_round")))
every_option = pytest.mark.parametrize(("counting", "theta"), OPTIONS)
NO_STEP = Step(math.nan, math.nan, math.nan, math.nan, math.nan)


# Drafted, accepted -> r, n exact, n printed. Emitted are a + 1 tokens, so |Q_v| = a + 1 and r = |Q_v| - 1.
ROUNDS = {
    "nothing accepted of 1": ((1, 0), (0, 1, 1)),
    "nothing accepted of five: printed counts the second as judged": ((5, 0), (0, 1, 2)),
    "rejected at the last token": ((5, 4), (4, 5, 5)),
    "rejected at the second to last": ((5, 3), (3, 4, 5)),
    "all accepted": ((5, 5), (5, 5, 5)),
    "the only token accepted": ((1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize(("round_", "counts"), ROUNDS.values(), ids=ROUNDS)
def test_what_a_round_counts(round_: tuple[int, int], counts: tuple[int, int, int]) -> None:
    successes, exact, printed = counts
    assert count_round((3.0, 4.0, 2.0), *round_, 0.0) == (3.0 + successes, 4.0 + exact, 3.0)
    assert count_round((3.0, 4.0, 2.0), *round_, 1.0) == (3.0 + successes, 4.0 + printed, 3.0)


@pytest.mark.parametrize(("counting", "alpha", "beta"), [("exact", 9.0, 3.5), ("printed", 9.0, 5.5)])
def test_three_rounds_of_algorithm_2(counting: str, alpha: float, beta: float) -> None:
    """From Beta(2, 1.5): rounds (d, a) = (4, 4), (5, 1), (6, 2).

    Exact: r = 4, 1, 2 and n = 4, 2, 3. Printed: n = 4, 3, 4.
    """
    policy = BetaTS(alpha0=2.0, beta0=1.5, counting=counting)
    state = policy.initial_state(policy.params)
    for drafted, accepted in ((4, 4), (5, 1), (6, 2)):
        state = policy.update(state, policy.params, drafted, accepted)
    accept_prob = policy.keep_probability(state, policy.params, NO_STEP, 3)
    assert accept_prob == alpha / (alpha + beta)
    assert policy.keep_drafting(state, policy.params, NO_STEP, 3, accept_prob - 1e-9) == (True, state)
    assert policy.keep_drafting(state, policy.params, NO_STEP, 3, accept_prob + 1e-9) == (False, state)


@pytest.mark.parametrize(("theta", "mean_draft"), [("per_token", 3.0), ("per_round", 4.0)])
def test_spread_of_the_posterior_lengthens_drafts_only_if_theta_is_drawn_per_round(
    theta: str, mean_draft: float
) -> None:
    """Beta(6, 3), unbounded drafts: 1 / (1 - 6/9) = 3, and E[1 / (1 - theta)] = (6 + 3 - 1) / (3 - 1) = 4.

    The mean is the sum over j of the chance of drafting beyond j. Summed to 100,000, where the
    urn's terms fall like j^-3; the rest is below 1e-7.
    """
    policy = BetaTS(alpha0=6.0, beta0=3.0, theta=theta)
    accept_probs = (policy.keep_probability((0.0, 0.0, 0.0), policy.params, NO_STEP, j) for j in range(1, 100_001))
    assert 1 + sum(accumulate(accept_probs, mul)) == pytest.approx(mean_draft, abs=1e-7)


def test_the_priors_to_report() -> None:
    """A weak prior, and a prior of mean 0.76 and weight 1500 tokens."""
    weak, strong = (BetaTS(**BetaTS.PRIORS[name]) for name in ("weak", "strong"))
    assert (weak.alpha0, weak.beta0) == (1.0, 1.0)
    assert strong.alpha0 + strong.beta0 == 1500 and strong.alpha0 / 1500 == 0.76
    fixed = [variant.fixed for variant in BetaTS.variants]
    assert BetaTS.PRIORS["weak"] in fixed and BetaTS.PRIORS["strong"] in fixed


def test_posterior_of_algorithm_3_by_hand() -> None:
    """theta0 = 0.6, sigma_M = 0.2, sigma_S = 0.4; three rounds with r = 5, n = 7; a score of 0.9.

    theta_hat = 5.6 / 8 = 0.7; weights 0.16 / 0.28 and 0.12 / 0.28; 1 / sigma^2 = 25 + 3 * 6.25.
    """
    params = CaliTS(theta0=0.6, sigma_m=0.2, sigma_s=0.4).params
    mu, sigma = posterior((5.0, 7.0, 3.0), params, 0.9)
    assert mu == pytest.approx(0.9 * 4 / 7 + 0.7 * 3 / 7, rel=1e-15)
    assert sigma == pytest.approx(1 / math.sqrt(43.75), rel=1e-15)
    assert posterior((0.0, 0.0, 0.0), params, 0.9) == (0.9, 0.2)  # at first the score alone


@pytest.mark.parametrize("mu", [-1.0, 0.0, 0.3, 0.97, 1.0, 1.4])
@pytest.mark.parametrize("sigma", [0.01, 0.3, 5.0])
def test_mean_of_a_clamped_gaussian(mu: float, sigma: float) -> None:
    """Against the integral of P(X > x) over [0, 1], which is the mean of clip(X, 0, 1)."""
    edges = np.clip(mu + sigma * np.arange(-6, 7), 0, 1)
    wanted = sum(
        integrate.quad(stats.norm(mu, sigma).sf, low, high, epsabs=1e-14)[0]
        for low, high in zip([0, *edges], [*edges, 1], strict=True)
    )
    assert clamped_mean(mu, sigma) == pytest.approx(wanted, abs=1e-12)


@given(st.floats(-3, 4), st.floats(-5, 2), st.floats(0, 1, exclude_min=True, exclude_max=True), st.floats(-2, 2))
def test_the_short_cut_decides_as_the_clamped_mean(mu: float, log_sigma: float, u: float, offset: float) -> None:
    """For any u, and for u near mu; to the rounding error of the mean, a few ulp of sigma or of 1."""
    sigma = 10**log_sigma
    for value in (u, min(max(mu + offset * sigma, 1e-12), 1 - 1e-12)):
        mean = clamped_mean(mu, sigma)
        if abs(value - mean) > 1e-15 * max(1.0, sigma) * 10:
            assert (value < threshold(value, mu, sigma)) == (value < mean)


@dataclass
class Bandit:
    """Algorithms 2 and 3 in plain Python, with their errata; `keep` is asked as a policy is.

    uniforms : draws that belong to a place; None where theta is really drawn, from rng
    """

    policy: BetaTS | CaliTS
    rng: np.random.Generator | None = None
    counting_error: float = 0.0  # to see that a wrong n shows

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.accepted = self.judged = self.rounds = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        emitted = accepted + 1  # |Q_v|
        self.accepted += emitted - 1
        extra = 0 if self.policy.counting == "exact" else 1
        self.judged += min(emitted + extra, drafted) + self.counting_error * (accepted < drafted)
        self.rounds += 1

    def keep(self, score: float, depth: int, u: float) -> bool:
        fresh = depth == 1 or self.policy.theta == "per_token"
        accept_prob = self.beta(depth, fresh) if isinstance(self.policy, BetaTS) else self.gauss(score, u, fresh)
        return (u if self.rng is None else self.rng.random()) < accept_prob

    def beta(self, depth: int, fresh: bool) -> float:
        assert isinstance(self.policy, BetaTS)
        alpha = self.policy.alpha0 + self.accepted
        beta = self.policy.beta0 + self.judged - self.accepted
        if self.rng is not None:
            if fresh:
                self.drawn = self.rng.beta(alpha, beta)
            return self.drawn
        ones = 0 if fresh else depth - 1
        return (alpha + ones) / (alpha + beta + ones)

    def gauss(self, score: float, u: float, fresh: bool) -> float:
        policy = self.policy
        assert isinstance(policy, CaliTS)
        model, sample = policy.sigma_m**2, policy.sigma_s**2
        theta_hat = (policy.theta0 + self.accepted) / (1 + self.judged)
        mu = (sample * score + self.rounds * model * theta_hat) / (self.rounds * model + sample)
        sigma = math.sqrt(1 / (1 / model + self.rounds / sample))
        if self.rng is None and policy.theta == "per_token":
            return clipped_mean(mu, sigma)
        if fresh:
            self.drawn = float(special.ndtri(split(u, 1))) if self.rng is None else self.rng.normal()
        return min(max(mu + sigma * self.drawn, 0.0), 1.0)


def clipped_mean(mu: float, sigma: float) -> float:
    """E[clip(N(mu, sigma^2), 0, 1)] from the truncated Gaussian's mean and the mass at 1."""
    low, high = -mu / sigma, (1 - mu) / sigma
    inside = stats.norm.cdf(high) - stats.norm.cdf(low)
    mean: float = mu * inside + sigma * (stats.norm.pdf(low) - stats.norm.pdf(high)) + stats.norm.sf(high)
    return mean


def decode(trace: Trace, bandit: Bandit, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Rounds (sequence, t, drafted, accepted) of a bandit over a trace, token by token."""
    for s, (start, end) in enumerate(zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)):
        if not bandit.policy.carry:
            bandit.begin()
        row = start
        while row < end:
            limit, drafted = min(bandit.policy.max_draft_tokens, int(trace.draft_limit[row])), 0
            while drafted < limit:
                drafted += 1
                score = 0.0 if trace.score is None else float(trace.score[row, drafted - 1])
                u = uniform(seed, int(trace.sequence_id[s]), row - start, drafted)
                if drafted < limit and not bandit.keep(score, drafted, u):
                    break
            accepted = min(drafted, int(trace.match_len[row]))
            if drafted:
                bandit.observe(drafted, accepted)
            yield s, row - start, drafted, accepted
            row += accepted + 1


def scored_trace(seed: int = 0) -> Trace:
    return small_trace(seed, score=np.random.default_rng(seed + 1).random((102, 6)).astype(np.float32))


PRIORS: dict[type[ChainPolicy], list[dict[str, Any]]] = {
    BetaTS: [{}, {"alpha0": 3.0, "beta0": 0.5}, {"alpha0": 0.2, "beta0": 0.1}],
    CaliTS: [{}, {"theta0": 1.0, "sigma_m": 1.5, "sigma_s": 0.1}, {"theta0": 0.2, "sigma_m": 0.02, "sigma_s": 3.0}],
}
both = pytest.mark.parametrize("kind", [BetaTS, CaliTS], ids=["beta_ts", "cali_ts"])


@both
@every_option
@pytest.mark.parametrize("carry", [False, True])
def test_replay_is_the_algorithm_round_for_round(kind: Any, counting: str, theta: str, carry: bool) -> None:
    caught = 0
    for seed, prior in product(range(4), PRIORS[kind]):
        policy = kind(counting=counting, theta=theta, carry=carry, max_draft_tokens=6, **prior)
        trace = scored_trace(seed)
        log = replay(trace, policy, cost_table(trace, RampCost()), seed=seed, log=True).rounds
        assert [row[:4] for row in log.rows()] == list(decode(trace, Bandit(policy), seed))
        wrong_n = Bandit(policy, counting_error=1.0)
        caught += [row[:4] for row in log.rows()] != list(decode(trace, wrong_n, seed))
        caught += [row[:4] for row in log.rows()] != list(decode(trace, Bandit(replace(policy, carry=not carry)), seed))
    assert caught >= 12  # of 24: counts are seen to matter, within sequences and across them


SIMULATIONS = 1500


@both
@every_option
def test_replay_has_the_distribution_of_theta_really_drawn(kind: Any, counting: str, theta: str) -> None:
    """Mean drafted and accepted tokens of 20,000 replays against 1500 runs that draw theta; 4 standard errors."""
    rng = np.random.default_rng(3)
    trace = build_trace(
        rng, rng.random((30, 8)) < 0.75, [30], score=rng.uniform(0.4, 1.1, (30, 8)).clip(0, 1).astype(np.float32)
    )
    many = trace.select(np.zeros(20_000, dtype=np.int64))
    many = replace(many, sequence_id=np.arange(20_000))
    policy = kind(counting=counting, theta=theta, max_draft_tokens=8, **PRIORS[kind][1])
    result = replay(many, policy, cost_table(many, RampCost()))

    def differs(bandit: Bandit) -> bool:
        runs = np.array([np.sum(list(decode(trace, bandit)), axis=0)[2:] for _ in range(SIMULATIONS)])
        gaps = []
        for sampled, drawn in zip((result.drafted, result.accepted), runs.T, strict=True):
            error = math.sqrt(sampled.var() / len(sampled) + drawn.var() / len(drawn))
            gaps.append(abs(sampled.mean() - drawn.mean()) / error)
        return max(gaps) > 4

    assert not differs(Bandit(policy, rng=rng))
    assert differs(Bandit(policy, rng=rng, counting_error=1.0))
    if kind is BetaTS:  # there the spread is wide enough to tell the two
        other = "per_round" if theta == "per_token" else "per_token"
        assert differs(Bandit(replace(policy, theta=other), rng=rng))


@pytest.mark.parametrize("accept_prob", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("counting", ["exact", "printed"])
@both
def test_long_run_means(kind: Any, counting: str, accept_prob: float) -> None:
    """Exact: p. Printed: theta = p / (1 + (1 - p) theta), a rejection drafted past counting twice.

    Under independent acceptance r is binomial among the judged tokens, n of them, so r / n
    misses p by a standard deviation of sqrt(p (1 - p) / n); printed less. Cali-TS is made to
    rely on its sample mean.
    """
    length = 60_000
    rng = np.random.default_rng(round(100 * accept_prob))
    hits = rng.random((length, 64)) < accept_prob
    trace = build_trace(rng, hits, [length], score=np.full(hits.shape, 0.5, dtype=np.float32))
    trace = replace(trace, meta={**trace.meta, "eos_token_id": None})
    policy = kind(counting=counting, max_draft_tokens=64, **({"sigma_s": 1e-3} if kind is CaliTS else {}))
    log = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), log=True).rounds
    state = policy.initial_state(policy.params)
    for _, _, drafted, accepted, *_ in log.rows():
        if drafted:
            state = policy.update(state, policy.params, drafted, accepted)
    missed = 1 - accept_prob
    fixed_point = (math.sqrt(1 + 4 * missed * accept_prob) - 1) / (2 * missed)
    wanted = accept_prob if counting == "exact" else fixed_point
    error = math.sqrt(accept_prob * missed / state[1])
    assert policy.keep_probability(state, policy.params, Step(0.5, 0.5, 0.5, 0.5, 0.5), 1) == pytest.approx(
        wanted, abs=4 * error
    )
    assert 4 * error < 0.015 < 0.7 * (accept_prob - fixed_point)  # the two rules are told apart
