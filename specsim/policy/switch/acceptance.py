"""The drafter whose tokens were accepted most of late."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.switch.base import SwitchPolicy, acceptance, added, no_sums


@nb.njit
def choose(state, params, foretold, lag):  # type: ignore[no-untyped-def]
    best, most = 0, -1.0
    for drafter in range(len(foretold)):
        rate = acceptance(state, params, drafter)
        if foretold[drafter] > 0.0 and rate > most:
            best, most = drafter, rate
    return best


@nb.njit
def count_tokens(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return added(state, params.discount, float(accepted), min(accepted + 1.0, float(drafted)))


@dataclass(frozen=True)
class SwitchAcceptance(SwitchPolicy):
    """Draft with the drafter of the highest running acceptance, of those that propose something.

    Rates are counted over accepted and rejected tokens, older rounds at a discount; a drafter that is left alone drifts
    back to the prior, so that it is tried again if that is high.
    """

    prior: float = setting(0.7, 0.0, 1.0, tune=(0.2, 1.0), doc="acceptance rate taken before any round")
    weight: float = setting(4.0, 1e-6, 1e6, tune=(0.5, 50.0), log=True, doc="how many tokens that counts for")
    discount: float = setting(0.95, 0.0, 1.0, tune=(0.7, 1.0), doc="what a round's counts keep with every round")

    name = "switch_acceptance"
    source = "the rule that engines' users write by hand; counts as in EESD, Algorithm 2"
    choose = staticmethod(choose)
    initial_state = staticmethod(no_sums)
    update = staticmethod(count_tokens)
