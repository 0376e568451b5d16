"""Max-Confidence: stop when the draft's top probability falls below lambda."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.dynamic_threshold import RATE_DECAY, THRESHOLD_DECAY, initial_state, update


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return step.confidence >= state[0], state


@dataclass(frozen=True)
class MaxConfidence(ChainPolicy):
    """Continue drafting while max_x p_draft(x) >= lambda (Draft & Verify; AdaEDL section 2).

    lambda is static, or dynamic by Algorithm 1 of AdaEDL, which is how that paper runs
    its baseline. The token whose test fails is kept and verified.
    """

    lambda0: float = setting(0.4, 0.0, 1.0, tune=(0.0, 0.95), doc="stopping threshold, at the start if dynamic")
    dynamic: bool = setting(True, 0, 1, doc="update lambda by Algorithm 1 of AdaEDL")
    target_rate: float = setting(0.9, 0.0, 1.0, doc="alpha, target acceptance rate of Algorithm 1")
    epsilon: float = setting(0.01, 0.0, 1.0, doc="step of lambda in Algorithm 1")
    rate_decay: float = setting(RATE_DECAY, 0.0, 1.0, doc="beta_1, weight of the past acceptance rate in Algorithm 1")
    threshold_decay: float = setting(THRESHOLD_DECAY, 0.0, 1.0, doc="beta_2, weight of the past lambda in Algorithm 1")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="L, longest draft in tokens")

    name = "max_confidence"
    source = "Agrawal et al. 2024 (AdaEDL), section 2; Zhang et al. 2024 (Draft & Verify)"
    features = ("confidence",)
    variants = (Variant("dynamic", {"dynamic": True}), Variant("static", {"dynamic": False}))
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)
