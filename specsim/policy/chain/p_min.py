"""llama.cpp's p-min: stop at the first token whose distribution is not peaked enough."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.memoryless import initial_state, update


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return step.confidence >= params.p_min, state


@nb.njit
def keep_drafting_by_top10(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return step.top10_confidence >= params.p_min, state


@dataclass(frozen=True)
class PMin(ChainPolicy):
    """Continue drafting while the top candidate's probability is at least p_min, at most max_draft_tokens tokens.

    The rule of static Max-Confidence with the engine's defaults of 2025; `llama_cpp` is today's. Departures: the
    engine takes the probability among its ten best candidates, here it is the whole distribution's; `--draft-min`
    is 0.
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


@dataclass(frozen=True)
class LlamaCpp(ChainPolicy):
    """Draft until the top candidate's probability among the ten best is below p_min; that token is dropped unverified.

    As releases of 2026 do, with their defaults, under which no draft stops early. Departures: the engine drafts at
    temperature 1 whatever the target's temperature is, here both have the target's; `--spec-draft-n-min` is 0.
    """

    p_min: float = setting(0.0, 0.0, 1.0, tune=(0.0, 0.95), doc="--spec-draft-p-min")
    max_draft_tokens: int = setting(3, 1, 256, bounds="depth", doc="--spec-draft-n-max, in tokens")

    name = "llama_cpp"
    source = "llama.cpp, common/speculative.cpp"
    features = ("top10_confidence",)
    drops_refused = True
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting_by_top10)
    update = staticmethod(update)
