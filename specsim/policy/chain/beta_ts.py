"""Beta-TS: continue drafting with a probability drawn from a Beta posterior of acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.estimates.counts import COUNTING, THETA, count_round


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (0.0, 0.0, 0.0)


@nb.njit(error_model="numpy")
def keep_probability(counts, params, step, depth):  # type: ignore[no-untyped-def]
    seen = (depth - 1.0) * params.theta  # what earlier draws of this round say of a theta that they share
    alpha = params.alpha0 + counts[0] + seen
    return alpha / (params.alpha0 + params.beta0 + counts[1] + seen)


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return u < keep_probability(state, params, step, depth), state


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return count_round(state, drafted, accepted, params.counting)


@dataclass(frozen=True)
class BetaTS(ChainPolicy):
    """Continue drafting if chi = 1: chi ~ Bernoulli(theta), theta ~ Beta(alpha0 + r, beta0 + n - r).

    r and n are sums over rounds, counted as `specsim.policy.estimates.counts` says. The token after
    which chi = 0 is verified, and at least 1 token is drafted.

    theta is integrated out, never drawn, which leaves the distribution of the drafts as it is. Drawn
    afresh per token, as printed, chi is Bernoulli(alpha / (alpha + beta)): the spread of the
    posterior has no effect. Drawn once per round, the j-th chi after j - 1 ones is
    Bernoulli((alpha + j - 1) / (alpha + beta + j - 1)), Polya's urn.

    The paper gives no prior; `PRIORS` are a weak prior and a prior strong enough for the draft
    lengths of its tables, which a fixed K = 4 has as well. Departures: r counts the accepted
    tokens, as |Q_v| - 1 of those alone would be negative; the posterior starts anew with
    every sequence unless it is carried; max_draft_tokens bounds the drafts.
    """

    alpha0: float = setting(1.0, 1e-6, 1e9, tune=(0.1, 2000.0), log=True, doc="prior successes, tokens")
    beta0: float = setting(1.0, 1e-6, 1e9, tune=(0.1, 2000.0), log=True, doc="prior failures, tokens")
    counting: str = setting(
        "exact", choices=COUNTING, doc="tokens counted as verified: min(a+1, d), or with printed min(a+2, d)"
    )
    theta: str = setting("per_token", choices=THETA, doc="how often theta is drawn")
    carry: bool = setting(False, 0, 1, doc="keep the posterior from sequence to sequence")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="longest draft in tokens")

    PRIORS: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "weak": {"alpha0": 1.0, "beta0": 1.0},
        "strong": {"alpha0": 1140.0, "beta0": 360.0},
    }

    name = "beta_ts"
    source = "Liu et al. 2024 (EESD), Algorithm 2 and Eqs. 2-4"
    variants = (
        Variant("tuned"),
        Variant("weak prior", PRIORS["weak"], tuned=False),
        Variant("strong prior", PRIORS["strong"], tuned=False),
    )
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def keep_probability(self) -> Callable[..., float]:
        """Chance of continuing to draft, given the counts; see `specsim.policy.estimates.counts`."""
        return keep_probability

    @property
    def carries_state(self) -> bool:
        return self.carry
