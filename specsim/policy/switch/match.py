"""Prompt lookup where it finds a match that it trusts, another drafter elsewhere, as Arctic Inference's hybrid does."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.switch.base import SwitchPolicy


@nb.njit
def choose(state, params, foretold):  # type: ignore[no-untyped-def]
    for drafter in range(len(foretold) - 1):
        if foretold[drafter] > 0.0 and foretold[drafter] >= params.least:
            return drafter
    return len(foretold) - 1


@dataclass(frozen=True)
class SwitchMatch(SwitchPolicy):
    """Draft with the first drafter whose first token is known to be `least` likely or more, else with the last drafter.

    A lookup's is the share of matches of that length which held so far; a drafter that must run to tell is always
    likely enough, so that lookups are joined before it.
    """

    least: float = setting(0.3, 0.0, 1.0, tune=(0.0, 0.95), doc="least probability of a lookup's first token")

    name = "switch_match"
    source = "Snowflake's Arctic Inference: suffix decoding where its score is high enough, else its LSTM drafter"
    choose = staticmethod(choose)
