"""Compile the cost table of a policy on a trace."""

from __future__ import annotations

from specsim.cost.joined import JoinedCost, joined_table
from specsim.cost.model import SPACE, CostModel, SpaceCost
from specsim.cost.table import CostTable, compile_table, context_range, refeeds
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace


def cost_table(trace: Trace, model: CostModel, policy: Policy | None = None) -> CostTable:
    """Compile the cost table of this policy on this trace, or of all policies that do not change costs."""
    if isinstance(trace, JoinedTrace):
        return joined_table(trace, model)
    if isinstance(model, JoinedCost):
        raise InputError(f"costs are of {len(model.parts)} drafters, the trace is of a single drafter; give its costs")
    model = round_cost_model(trace, model, policy)
    trees = trace.true_rank is not None and not isinstance(policy, ChainPolicy)
    contexts, again = context_range(trace), refeeds(trace)
    return compile_table(model, max_draft_tokens=trace.depth, contexts=contexts, trees=trees, refeeds=again)


def round_cost_model(trace: Trace, model: CostModel, policy: Policy | None = None) -> CostModel:
    """Return the cost model of this policy's rounds on this trace, or a lower bound for all policies.

    SPACE's masks are part of every pass, so the policy's longest draft decides the cost of a pass.
    """
    if policy is not None:
        model = policy.cost(model)
    if trace.drafter_kind != SPACE:
        return model
    inner = model.model if isinstance(model, SpaceCost) else model
    return SpaceCost(inner, None if policy is None else policy.max_draft_tokens, draft_steps=True)


def has_own_cost(trace: Trace, kind: type[Policy]) -> bool:
    """Tell whether the settings of this kind of policy change the cost of a round."""
    return kind.cost is not Policy.cost or trace.drafter_kind == SPACE
