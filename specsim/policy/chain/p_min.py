"""llama.cpp's p-min: stop after the first token whose distribution is not peaked enough."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (0.0,)


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return step.confidence >= params.p_min, state


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return state


@dataclass(frozen=True)
class PMin(ChainPolicy):
    """Continue drafting while the top candidate's probability is at least p_min, at most max_draft_tokens tokens.

    The rule of static Max-Confidence with the engine's defaults. Departures: the engine takes the
    probability among its ten best candidates, here it is the whole distribution's; the token that
    fails is kept, as in the releases of 2025, where later ones drop it; `--draft-min` is 0.
    """

    p_min: float = setting(0.75, 0.0, 1.0, tune=(0.0, 0.95), doc="--draft-p-min")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="--draft-max, in tokens")

    name = "p_min"
    source = "llama.cpp, common/speculative.cpp"
    features = ("confidence",)
    variants = (Variant("default", tuned=False),)  # tuned, it is static Max-Confidence
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def adapts(self) -> bool:
        return False
