"""AdaEDL: stop when an entropy-based acceptance score falls below lambda."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.dynamic_threshold import RATE_DECAY, THRESHOLD_DECAY, initial_state, update


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return 1.0 - math.sqrt(params.gamma * step.entropy_nats) >= state[0], state


@dataclass(frozen=True)
class AdaEDL(ChainPolicy):
    """Continue drafting while 1 - sqrt(gamma H) >= lambda, H the draft entropy in nats.

    The paper calls the score a lower bound on acceptance; a confident wrong drafter
    breaks it, so it is a score here. It is negative above 1/gamma nats, hence the search
    range of lambda. The token whose test fails is kept and verified.
    """

    gamma: float = setting(0.2, 1e-6, 10.0, tune=(0.02, 1.0), log=True, doc="entropy factor")
    lambda0: float = setting(0.3, -10.0, 1.0, tune=(-1.0, 0.9), doc="stopping threshold, at the start if dynamic")
    dynamic: bool = setting(True, 0, 1, doc="update lambda by Algorithm 1")
    target_rate: float = setting(0.9, 0.0, 1.0, doc="alpha, target acceptance rate of Algorithm 1")
    epsilon: float = setting(0.01, 0.0, 1.0, doc="step of lambda in Algorithm 1")
    rate_decay: float = setting(RATE_DECAY, 0.0, 1.0, doc="beta_1, weight of the past acceptance rate in Algorithm 1")
    threshold_decay: float = setting(THRESHOLD_DECAY, 0.0, 1.0, doc="beta_2, weight of the past lambda in Algorithm 1")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="L, longest draft in tokens")

    name = "adaedl"
    source = "Agrawal et al. 2024 (AdaEDL), section 3 and Algorithm 1"
    features = ("entropy_nats",)
    variants = (Variant("dynamic", {"dynamic": True}), Variant("static", {"dynamic": False}))
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)
