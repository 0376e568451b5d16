"""Cali-TS whose predictor is the draft model's own confidence, calibrated: no training, and no cost at run time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.chain.cali_ts import clamped_mean, initial_state, keep_drafting, posterior, update
from specsim.policy.estimates.counts import COUNTING, THETA

CERTAIN = 1e-6  # confidence is kept so far from 0 and 1


@nb.njit
def calibrated(confidence, params):  # type: ignore[no-untyped-def]
    """sigmoid(slope logit(confidence) + offset), Platt scaling."""
    c = min(max(confidence, CERTAIN), 1.0 - CERTAIN)
    return 1.0 / (1.0 + math.exp(-params.slope * math.log(c / (1.0 - c)) - params.offset))


@nb.njit
def keep_probability(counts, params, step, depth):  # type: ignore[no-untyped-def]
    mu, sigma = posterior(counts, params, calibrated(step.confidence, params))
    return clamped_mean(mu, sigma)


@nb.njit
def keep_by_confidence(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    scored = Step(step.prob, step.confidence, step.entropy_nats, calibrated(step.confidence, params), 0.0)
    return keep_drafting(state, params, scored, depth, u)


@dataclass(frozen=True)
class CaliTSConfidence(ChainPolicy):
    """Cali-TS with theta_M = sigmoid(slope logit(c) + offset), c the largest draft probability.

    Everything else is `specsim.policy.chain.cali_ts`, in whose place the paper's trained predictor is. Slope and
    offset are tuned with the other settings; a slope of 1 and an offset of 0 take the confidence as it is. Any drafter
    that reports probabilities can be stopped so, and a draft step costs what it costs without a predictor.
    """

    slope: float = setting(1.0, 0.0, 100.0, tune=(0.25, 4.0), log=True, doc="of the calibrated confidence, in logits")
    offset: float = setting(0.0, -50.0, 50.0, tune=(-3.0, 3.0), doc="of the calibrated confidence, in logits")
    theta0: float = setting(0.5, 0.0, 1.0, tune=(0.0, 1.0), doc="acceptance at the start, with the weight of one token")
    sigma_m: float = setting(0.1, 1e-6, 100.0, tune=(0.005, 1.0), log=True, doc="error of the calibrated confidence")
    sigma_s: float = setting(0.25, 1e-6, 1e4, tune=(0.02, 20.0), log=True, doc="spread of a round's mean acceptance")
    counting: str = setting(
        "exact", choices=COUNTING, doc="tokens counted as verified: min(a+1, d), or with printed min(a+2, d)"
    )
    theta: str = setting("per_token", choices=THETA, doc="how often theta's deviation from mu is drawn")
    carry: bool = setting(False, 0, 1, doc="keep the counts from sequence to sequence")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="longest draft in tokens")

    name = "cali_ts_confidence"
    source = "Liu et al. 2024 (EESD), Algorithm 3, with Platt 1999 for the trained predictor"
    features = ("confidence",)
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_by_confidence)
    update = staticmethod(update)

    @property
    def keep_probability(self) -> Callable[..., float] | None:
        """Chance of continuing to draft, given the counts; None if a round's tokens share their draw."""
        return keep_probability if self.theta == "per_token" else None

    @property
    def carries_state(self) -> bool:
        return self.carry
