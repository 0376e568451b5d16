"""The drafter that promises the most tokens for the time that its round takes."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.switch.acceptance import count_tokens
from specsim.policy.switch.base import PricedSwitch, acceptance, longest_draft, no_sums, round_price


@nb.njit(error_model="numpy")
def choose(state, params, foretold, lag):  # type: ignore[no-untyped-def]
    best, most = 0, -1.0
    for drafter in range(len(foretold)):
        if foretold[drafter] > 0.0:
            rate, tokens, reach = acceptance(state, params, drafter), 1.0, foretold[drafter]
            for _ in range(longest_draft(params, drafter)):
                reach *= rate
                tokens += reach
            gain = tokens / round_price(params, drafter, lag[drafter])
            if gain > most:
                best, most = drafter, gain
    return best


@dataclass(frozen=True)
class SwitchGain(PricedSwitch):
    """Draft with the drafter of the most expected tokens per second, of those that propose something.

    Expected are 1 + p + p^2 + ... + p^k tokens (Leviathan et al., Eq. 1), p being the drafter's running acceptance as
    in `SwitchAcceptance`; a lookup's are weighed by how likely its first token is. A round takes what the costs say of
    the drafter's longest draft, and of catching up on the tokens that others drafted meanwhile.
    """

    prior: float = setting(0.7, 0.0, 1.0, tune=(0.2, 1.0), doc="acceptance rate taken before any round")
    weight: float = setting(4.0, 1e-6, 1e6, tune=(0.5, 50.0), log=True, doc="how many tokens that counts for")
    discount: float = setting(0.95, 0.0, 1.0, tune=(0.7, 1.0), doc="what a round's counts keep with every round")

    name = "switch_gain"
    source = "Leviathan et al. 2023, arXiv:2211.17192, Eq. 1, over measured costs"
    choose = staticmethod(choose)
    initial_state = staticmethod(no_sums)
    update = staticmethod(count_tokens)
