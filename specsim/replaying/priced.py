"""A trace and what things cost on it: what every replay, search and comparison starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy.typing as npt

from specsim.cost.model import CostModel
from specsim.cost.table import CostTable, autoregressive_seconds
from specsim.io.arrays import Floats
from specsim.policy.base import Policy
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table, has_own_cost
from specsim.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class PricedTrace:
    """A trace under a cost model. Its cost table and baseline are computed once."""

    trace: Trace
    cost: CostModel

    def table(self, policy: Policy | None = None) -> CostTable:
        """The cost table of this policy, or of all policies that do not change costs."""
        if policy is not None and has_own_cost(self.trace, type(policy)):
            return cost_table(self.trace, self.cost, policy)
        return self._shared_table

    @cached_property
    def _shared_table(self) -> CostTable:
        return cost_table(self.trace, self.cost)

    @cached_property
    def baseline_s(self) -> Floats:
        """Autoregressive seconds per sequence [S] for the same tokens."""
        return autoregressive_seconds(self.trace, self.table())

    def select(self, sequences: npt.ArrayLike) -> PricedTrace:
        """Select sequences by index, in this order."""
        return PricedTrace(self.trace.select(sequences), self.cost)

    def replay(self, policy: Policy, *, seed: int = 0, log: bool = False) -> Replay:
        """Replay a policy under its own cost of a round; see `specsim.replaying.replay.replay`."""
        return replay(self.trace, policy, self.table(policy), seed=seed, log=log)
