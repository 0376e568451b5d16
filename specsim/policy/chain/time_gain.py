"""TimeGain: continue drafting while the chain's probability exceeds the cost of a draft step in target steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numba as nb

from specsim.policy.base import Settings, Variant, build_policy, setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.memoryless import update

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (1.0,)


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    chain = step.confidence if depth == 1 else state[0] * step.confidence
    return chain >= params.cost_ratio, (chain,)


@dataclass(frozen=True)
class TimeGain(ChainPolicy):
    """Continue drafting while p_j = c_1 ... c_j >= s_d / s_t, c_i the confidence of token i (Eq. 5 on a chain).

    The expected extra time of a draft step is s_d - p_j s_t. `fit` reads s_d / s_t from the
    costs unless it is given. As in PCT, the token after which p_j falls short is verified,
    but nothing is drafted after it. The rule values a token at s_t, what it costs without
    speculation; `RenewalStop` values it at what it costs with it.
    """

    cost_ratio: float = setting(0.1, 0.0, 10.0, tune=(0.003, 1.0), log=True, doc="s_d / s_t, from the costs if absent")
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="longest draft in tokens")

    name = "time_gain"
    source = "EDD + PCT, Eq. 5 and section 3.2"
    features = ("confidence",)
    variants = (Variant("s_d / s_t of the costs", tuned=False), Variant("tuned"))
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @classmethod
    def fit(cls, settings: Settings, train: Trace, table: CostTable) -> Self:
        return build_policy(cls, {"cost_ratio": table.step_ratio, **settings})
