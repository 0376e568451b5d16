"""SPACE's fixed k: a chain whose drafts ride in the verification pass."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.cost.model import SPACE, CostModel, SpaceCost
from specsim.policy.base import setting
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import keep_drafting
from specsim.policy.memoryless import initial_state, update


@dataclass(frozen=True)
class SpaceK(ChainPolicy):
    """k candidates a pass, proposed by mask tokens in the pass before (SPACE).

    The acceptance is the trace's. On a trace of another drafter than SPACE's this says what that
    acceptance would be worth at SPACE's cost, with candidates for nothing; on a trace of SPACE every chain policy
    has this cost, and the measured cost of a candidate (`specsim.replaying.table.round_cost_model`).
    """

    k: int = setting(5, 1, 64, tune=(1, 10), bounds="depth", doc="candidates a pass, in tokens")

    name = "space_k"
    source = "Yi et al. 2024 (SPACE), section 3"
    drafter_kinds = (SPACE,)
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    def cost(self, model: CostModel) -> CostModel:
        return SpaceCost(model, self.k)

    @property
    def max_draft_tokens(self) -> int:
        return self.k
