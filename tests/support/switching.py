"""A switching policy whose state learns from rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import setting
from specsim.policy.switch.base import SwitchPolicy


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (0.0, 0.0)  # the drafter of the last round, and whose turn it is


@nb.njit
def choose(state, params, foretold):  # type: ignore[no-untyped-def]
    for turn in range(len(foretold)):
        drafter = (int(state[1]) + turn) % len(foretold)
        if foretold[drafter] > 0.0:
            return drafter
    return 0


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return (state[0], state[0] + 1.0 if accepted < drafted else state[1])


@dataclass(frozen=True)
class TakesTurns(SwitchPolicy):
    """Draft with one drafter until a token is rejected, then with the next that proposes something."""

    carry: bool = setting(True, 0, 1, doc="keep the turn from sequence to sequence")

    name = "takes_turns"
    source = "tests"
    initial_state = staticmethod(initial_state)
    choose = staticmethod(choose)
    update = staticmethod(update)

    @property
    def carries_state(self) -> bool:
        return self.carry
