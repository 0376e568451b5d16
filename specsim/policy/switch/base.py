"""Base of switching policies, which choose the drafter of the next round and when it stops.

    choose(state, params, foretold, lag) -> drafter, from 0

is a numba function beside those of `specsim.policy.base`. It sees, for each of the len(foretold)
drafters, the probability of its first token that is known before drafting (`specsim.trace.joined.foretold`; 0 if it
proposes nothing), and how many tokens its cache lacks. It is called if any drafter proposes something, and its choice
is kept in state[0], where `keep_drafting` and `update` read it.

All policies here stop by the same rule: after the drafter's k tokens, or at a token whose confidence is below the
drafter's floor, which is verified. Policies that learn from rounds keep a state of 7 numbers: the drafter, and for each
drafter two sums that shrink by `discount` with every round, so that old rounds count little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numba as nb

from specsim.cost.joined import JoinedTable
from specsim.io.errors import InputError
from specsim.policy.base import build_policy, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.trace.joined import JoinedTrace

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace


@nb.njit
def no_state(params):  # type: ignore[no-untyped-def]
    return (0.0,)


@nb.njit
def no_sums(params):  # type: ignore[no-untyped-def]
    return (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    floors = (params.floor1, params.floor2, params.floor3)
    return step.confidence >= floors[int(state[0])], state


@nb.njit
def no_update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    return state


@nb.njit
def longest_draft(params, drafter):  # type: ignore[no-untyped-def]
    """Most tokens that this drafter drafts in a round."""
    return int((params.k1, params.k2, params.k3)[drafter])


@nb.njit
def chosen(state, drafter):  # type: ignore[no-untyped-def]
    """Return the state of a round that drafts with this drafter."""
    return (float(drafter),) + state[1:]  # noqa: RUF005 (numba unpacks no tuples)


@nb.njit
def added(state, discount, first, second):  # type: ignore[no-untyped-def]
    """Return the state after a round that adds `first` and `second` to the two sums of its drafter."""
    d = state[0]
    return (
        d,
        discount * state[1] + (first if d == 0.0 else 0.0),
        discount * state[2] + (first if d == 1.0 else 0.0),
        discount * state[3] + (first if d == 2.0 else 0.0),
        discount * state[4] + (second if d == 0.0 else 0.0),
        discount * state[5] + (second if d == 1.0 else 0.0),
        discount * state[6] + (second if d == 2.0 else 0.0),
    )


@nb.njit
def sums_of(state, drafter):  # type: ignore[no-untyped-def]
    """Return the two sums of this drafter."""
    return state[1 + drafter], state[4 + drafter]


@nb.njit(error_model="numpy")
def acceptance(state, params, drafter):  # type: ignore[no-untyped-def]
    """Estimate this drafter's recent acceptance rate, with `weight` prior tokens accepted at rate `prior`."""
    hits, trials = sums_of(state, drafter)
    return (hits + params.prior * params.weight) / (trials + params.weight)


@nb.njit
def round_price(params, drafter, lag):  # type: ignore[no-untyped-def]
    """Compute the cost of a round of this drafter, in target passes, if its cache lacks `lag` tokens."""
    round_cost = (params.cost1, params.cost2, params.cost3)[drafter]
    return round_cost + lag * (params.catch_up1, params.catch_up2, params.catch_up3)[drafter]


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
    initial_state = staticmethod(no_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(no_update)

    @property
    def max_draft_tokens(self) -> int:
        return max(self.k1, self.k2, self.k3)

    @property
    def least_drafters(self) -> int:
        """Fewest drafters that a joined trace must have for this policy."""
        return 1

    @classmethod
    def unsearched(cls, trace: Trace) -> dict[str, Any]:
        drafters = len(trace.parts) if isinstance(trace, JoinedTrace) else 1
        return {} if drafters >= 3 else {"k3": 1, "floor3": 0.0}


@dataclass(frozen=True)
class PricedSwitch(SwitchPolicy):
    """Base of policies that weigh the cost of a round, read by `fit` from the costs at each drafter's longest draft."""

    cost1: float = setting(0.0, 0.0, 1e9, doc="a round of the first drafter in target passes, from the costs if 0")
    cost2: float = setting(0.0, 0.0, 1e9, doc="of the second")
    cost3: float = setting(0.0, 0.0, 1e9, doc="of the third")
    catch_up1: float = setting(0.0, 0.0, 1e9, doc="catching up on a token with the first, in target passes")
    catch_up2: float = setting(0.0, 0.0, 1e9, doc="with the second")
    catch_up3: float = setting(0.0, 0.0, 1e9, doc="with the third")

    @classmethod
    def fit(cls, settings: Mapping[str, Any], train: Trace, table: CostTable) -> Self:
        if not isinstance(table, JoinedTable):
            raise InputError(f"policy {cls.name} reads the costs of several drafters; join traces and costs first")
        policy, learned = build_policy(cls, settings), dict[str, float]()
        pass_s, longest = table.autoregressive_s, len(table.each_catch_up_s[0]) - 1
        for number in range(len(table.each_draft_s)):
            k = longest_draft.py_func(policy, number)
            round_s = table.each_draft_s[number, k] + table.each_verify_s[number, k + 1]
            learned[f"cost{number + 1}"] = float(((round_s + table.each_round_overhead_s[number]) / pass_s).mean())
            behind_s = table.each_catch_up_s[number, longest] / longest
            learned[f"catch_up{number + 1}"] = float((behind_s / pass_s).mean())
        return build_policy(cls, {**learned, **settings})
