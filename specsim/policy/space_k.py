"""SPACE's fixed k: a chain whose drafts ride in the verification pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specsim.cost import CostModel, Seconds
from specsim.policy.base import ChainPolicy, setting
from specsim.policy.fixed_k import initial_state, keep_drafting, update


@dataclass(frozen=True)
class SpaceCost(CostModel):
    """Costs of SPACE: no draft step, and every pass holds 1 + k(k + 2) tokens.

    Those are the pending token, k candidates, and k mask tokens after it and after each
    candidate. A shorter draft at the end of the output has the same layout.
    """

    model: CostModel
    k: int

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.zeros(np.shape(context))

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return self.model.verify(1 + self.k * (self.k + 2), context)

    def round_overhead(self) -> float:
        return self.model.round_overhead()

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return self.model.autoregressive_step(context)


@dataclass(frozen=True)
class SpaceK(ChainPolicy):
    """k candidates a pass, proposed by mask tokens in the pass before (SPACE).

    The acceptance is the trace's. On a trace of another drafter than SPACE's this says what that
    acceptance would be worth at SPACE's cost.
    """

    k: int = setting(5, 1, 64, tune=(1, 10), doc="candidates a pass, in tokens")

    name = "space_k"
    source = "Yi et al. 2024 (SPACE), section 3"
    drafter_kinds = ("masks",)
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    def cost(self, model: CostModel) -> CostModel:
        return SpaceCost(model, self.k)

    @property
    def max_draft_tokens(self) -> int:
        return self.k

    @property
    def adapts(self) -> bool:
        return False
