"""A bandit whose arms are the drafters: discounted UCB on the speedup of their rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.switch.base import PricedSwitch, added, no_sums, round_price, sums_of


@nb.njit(error_model="numpy")
def choose(state, params, foretold, lag):  # type: ignore[no-untyped-def]
    total = state[4] + state[5] + state[6]
    best, most = 0, -1.0
    for drafter in range(len(foretold)):
        if foretold[drafter] > 0.0:
            gains, rounds = sums_of(state, drafter)
            index = math.inf
            if rounds > 0.0:
                index = gains / rounds + params.width * math.sqrt(math.log(max(total, 1.0)) / rounds)
            if index > most:
                best, most = drafter, index
    return best


@nb.njit(error_model="numpy")
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return added(state, params.discount, (accepted + 1.0) / round_price(params, int(state[0]), 0), 1.0)


@dataclass(frozen=True)
class SwitchBandit(PricedSwitch):
    """Draft with the drafter of the highest upper confidence bound, of those that propose something.

    A round's gain is its emitted tokens over what it takes in target passes. The bound is the mean gain plus
    width sqrt(log n / n_d), n rounds in all and n_d of the drafter, older ones at a discount. Departures: BanditSpec's
    reward is the accepted length alone, of arms that are settings of speculative decoding; the posterior
    lives on from sequence to sequence unless `carry` is false.
    """

    width: float = setting(0.5, 0.0, 100.0, tune=(0.01, 3.0), log=True, doc="of the confidence bound, target passes")
    discount: float = setting(0.98, 0.0, 1.0, tune=(0.8, 1.0), doc="what a round's gain keeps with every round")
    carry: bool = setting(True, 0, 1, doc="keep the sums from sequence to sequence")

    name = "switch_bandit"
    source = "Hou et al. 2025 (BanditSpec), arXiv:2505.15141; Garivier and Moulines 2011 (discounted UCB)"
    choose = staticmethod(choose)
    initial_state = staticmethod(no_sums)
    update = staticmethod(update)

    @property
    def carries_state(self) -> bool:
        return self.carry
