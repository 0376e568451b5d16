"""A single drafter of a joined trace: the baseline that switching must beat."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.switch.base import SwitchPolicy


@nb.njit
def choose(state, params, foretold):  # type: ignore[no-untyped-def]
    return int(params.drafter) - 1


@dataclass(frozen=True)
class OneDrafter(SwitchPolicy):
    """Draft with this drafter always, to its K or to a token below its floor; where it has nothing, draft nothing."""

    drafter: int = setting(1, 1, 3, tune=(1, 3), doc="which drafter, from 1")

    name = "one_drafter"
    source = "Leviathan et al. 2023, arXiv:2211.17192, with static Max-Confidence (AdaEDL, section 2)"
    choose = staticmethod(choose)

    @property
    def least_drafters(self) -> int:
        return self.drafter
