"""Base of switching policies, which choose the drafter of the next round and when it stops.

    choose(state, params, foretold) -> drafter, from 0

is a numba function beside those of `specsim.policy.base`. It sees, for each of the len(foretold)
drafters, the probability of its first token that is known before drafting (`specsim.trace.joined.foretold`; 0 if it
proposes nothing). It is called if any drafter proposes something, and its choice is kept in state[0], where
`keep_drafting` and `update` read it.

All policies here stop by the same rule: after the drafter's k tokens, or at a token whose confidence is below the
drafter's floor, which is verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numba as nb

from specsim.policy.base import Settings, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.memoryless import initial_state, update
from specsim.trace.joined import JoinedTrace

if TYPE_CHECKING:
    from specsim.trace.trace import Trace


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    floors = (params.floor1, params.floor2, params.floor3)
    return step.confidence >= floors[int(state[0])], state


@nb.njit
def longest_draft(params, drafter):  # type: ignore[no-untyped-def]
    """Most tokens that this drafter drafts in a round."""
    return int((params.k1, params.k2, params.k3)[drafter])


@nb.njit
def chosen(state, drafter):  # type: ignore[no-untyped-def]
    """Return the state of a round that drafts with this drafter."""
    return (float(drafter),) + state[1:]  # noqa: RUF005 (numba unpacks no tuples)


@dataclass(frozen=True)
class SwitchPolicy(ChainPolicy):
    """Base of every switching policy; drafters are counted from 1, in the order in which they were joined."""

    k1: int = setting(4, 1, 256, tune=(1, 16), bounds="depth", doc="longest draft of the first drafter, tokens")
    k2: int = setting(4, 1, 256, tune=(1, 16), bounds="depth", doc="longest draft of the second, tokens")
    k3: int = setting(4, 1, 256, tune=(1, 16), bounds="depth", doc="longest draft of the third, tokens")
    floor1: float = setting(0.0, 0.0, 1.0, tune=(0.0, 0.95), doc="confidence below which the first drafter stops")
    floor2: float = setting(0.0, 0.0, 1.0, tune=(0.0, 0.95), doc="confidence below which the second stops")
    floor3: float = setting(0.0, 0.0, 1.0, tune=(0.0, 0.95), doc="confidence below which the third stops")

    functions: ClassVar[tuple[str, ...]] = ("initial_state", "choose", "keep_drafting", "update")
    features = ("confidence",)
    choose: ClassVar[Callable[..., Any]]
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def max_draft_tokens(self) -> int:
        return max(self.k1, self.k2, self.k3)

    @property
    def least_drafters(self) -> int:
        """Fewest drafters that a joined trace must have for this policy."""
        return 1

    @classmethod
    def unsearched(cls, trace: Trace) -> Settings:
        drafters = len(trace.parts) if isinstance(trace, JoinedTrace) else 1
        return {} if drafters >= 3 else {"k3": 1, "floor3": 0.0}
