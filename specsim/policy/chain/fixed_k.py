"""Base-SPD: draft exactly K tokens every round."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.memoryless import initial_state, update


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return depth < params.k, state


@dataclass(frozen=True)
class FixedK(ChainPolicy):
    """Static draft length K, in tokens (Leviathan et al. 2023, their gamma)."""

    k: int = setting(4, 1, 256, tune=(1, 64), bounds="depth", doc="draft length K in tokens")

    name = "fixed_k"
    source = "Leviathan et al. 2023, arXiv:2211.17192; Base-SPD in AdaEDL, section 2"
    variants = (Variant("tuned"), Variant("K = 4", {"k": 4}, tuned=False))
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def max_draft_tokens(self) -> int:
        return self.k
