"""Cali-TS: a predictor's score, calibrated by the acceptance seen so far, decides whether to continue drafting."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numba as nb

from specsim.cost.model import CostModel
from specsim.cost.profile import with_scores
from specsim.io.rng import normal_quantile, split
from specsim.policy.base import setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.estimates.counts import COUNTING, THETA, count_round


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (0.0, 0.0, 0.0, 0.0)


@nb.njit(error_model="numpy")
def posterior(counts, params, score):  # type: ignore[no-untyped-def]
    """(mu, sigma) of theta by Eqs. 6 and 7; the score's weight is 1 at first and falls with rounds."""
    sample_mean = (params.theta0 + counts[0]) / (1.0 + counts[1])
    weight = params.sigma_s**2 / (counts[2] * params.sigma_m**2 + params.sigma_s**2)
    return sample_mean + weight * (score - sample_mean), params.sigma_m * math.sqrt(weight)


@nb.njit(error_model="numpy")
def clamped_mean(mu, sigma):  # type: ignore[no-untyped-def]
    """E[clip(X, 0, 1)] of X ~ N(mu, sigma^2)."""
    return sigma * (mean_excess(mu / sigma) - mean_excess((mu - 1.0) / sigma))


@nb.njit
def mean_excess(x):  # type: ignore[no-untyped-def]
    """E[max(Z + x, 0)] = x Phi(x) + phi(x) of a standard normal Z."""
    return 0.5 * x * math.erfc(-x * math.sqrt(0.5)) + math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


@nb.njit
def keep_probability(counts, params, step, depth):  # type: ignore[no-untyped-def]
    mu, sigma = posterior(counts, params, step.score)
    return clamped_mean(mu, sigma)


@nb.njit
def threshold(u, mu, sigma):  # type: ignore[no-untyped-def]
    """Return a bound that u is below exactly if it is below the clamped mean, mostly without computing the mean."""
    nearest = min(max(mu, 0.0), 1.0)  # the clamped mean is never farther from it than phi(0) sigma
    return nearest if abs(u - nearest) > 0.4 * sigma else clamped_mean(mu, sigma)


@nb.njit
def first_deviation(u):  # type: ignore[no-untyped-def]
    """Draw the round's standard normal z from the uniform of its first decision."""
    return normal_quantile(split(u, 1))


@nb.njit(inline="always")  # the compiler would not, at twice the time per draft step
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    mu, sigma = posterior(state, params, step.score)
    if params.theta == 0.0:
        return u < threshold(u, mu, sigma), state
    z = first_deviation(u) if depth == 1 else state[3]
    return u < mu + sigma * z, (state[0], state[1], state[2], z)  # u in (0, 1) needs no clamped theta


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    successes, verified, rounds = count_round(state, drafted, accepted, params.counting)
    return (successes, verified, rounds, 0.0)


@dataclass(frozen=True)
class CaliTS(ChainPolicy):
    """Continue drafting if chi = 1: chi ~ Bernoulli(theta), theta ~ N(mu, sigma^2) clamped to [0, 1].

        mu = w theta_M + (1 - w) theta_hat,   sigma^2 = w sigma_M^2,   w = sigma_S^2 / (m sigma_M^2 + sigma_S^2)

    with m rounds so far (Eqs. 6 and 7), theta_M the predictor's score of the token just drafted,
    and theta_hat = (theta0 + r) / (1 + n), r and n summed over rounds as
    `specsim.policy.estimates.counts` says. The token after which chi = 0 is verified.

    Drawn per token, as printed, theta is integrated out, which leaves the distribution of the drafts as it
    is: chi is Bernoulli(E[clip(X, 0, 1)]), X ~ N(mu, sigma^2). As clip(X, 0, 1) = max(X, 0)
    - max(X - 1, 0) and E[max(X - c, 0)] = sigma psi((mu - c) / sigma) with psi(x) = x Phi(x) + phi(x),
    that is sigma (psi(mu / sigma) - psi((mu - 1) / sigma)). Per round, a standard normal z is drawn
    after the first token, and theta = mu + sigma z, mu following the scores.

    Departures: Eq. 8 adds as much to its numerator as to its denominator and tends to 1 whatever
    is rejected, so the sample mean that the text asks for stands in its place. sigma_S, the spread
    of a round's mean acceptance over k tokens, is a constant though k varies. The paper does not
    clamp, names no values, and its Algorithm 3 lists mu_0 and sigma_0 without using them. The counts
    start anew with every sequence unless they are carried; max_draft_tokens bounds the drafts.
    """

    theta0: float = setting(0.5, 0.0, 1.0, tune=(0.0, 1.0), doc="acceptance at the start, with the weight of one token")
    sigma_m: float = setting(0.1, 1e-6, 100.0, tune=(0.005, 1.0), log=True, doc="error of the predictor's score")
    sigma_s: float = setting(0.25, 1e-6, 1e4, tune=(0.02, 20.0), log=True, doc="spread of a round's mean acceptance")
    counting: str = setting(
        "exact", choices=COUNTING, doc="tokens counted as verified: min(a+1, d), or with printed min(a+2, d)"
    )
    theta: str = setting("per_token", choices=THETA, doc="how often theta's deviation from mu is drawn")
    carry: bool = setting(False, 0, 1, doc="keep the counts from sequence to sequence")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="longest draft in tokens")

    name = "cali_ts"
    source = "Liu et al. 2024 (EESD), Algorithm 3 and Eqs. 5-8"
    features = ("score",)
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def keep_probability(self) -> Callable[..., float] | None:
        """Chance of continuing to draft, given the counts; None if a round's tokens share their draw."""
        return keep_probability if self.theta == "per_token" else None

    def cost(self, model: CostModel) -> CostModel:
        return with_scores(model)

    @property
    def carries_state(self) -> bool:
        return self.carry
