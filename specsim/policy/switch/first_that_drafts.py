"""The first drafter that proposes something, as llama.cpp's chained drafters do."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.switch.base import SwitchPolicy


@nb.njit
def choose(state, params, foretold):  # type: ignore[no-untyped-def]
    for drafter in range(len(foretold) - 1):
        if foretold[drafter] > 0.0:
            return drafter
    return len(foretold) - 1


@dataclass(frozen=True)
class FirstThatDrafts(SwitchPolicy):
    """Draft with the first drafter, in the order in which they were joined, that proposes something.

    A lookup without a match is passed over; where no drafter proposes anything, nothing is drafted. llama.cpp asks its
    lookups before a draft model, so join them first. Difference: a draft model always proposes a token here, and
    llama.cpp passes over one whose first token is below `--spec-draft-p-min`.
    """

    name = "first_that_drafts"
    source = "llama.cpp: several types in --spec-type, of which the first with a draft wins"
    choose = staticmethod(choose)
