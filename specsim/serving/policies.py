"""Policies and rules that decode in batches, by name, class or object, fitted where they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

from specsim.cost.files import with_batch
from specsim.cost.model import CostModel
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.learn.fit import fit, needs_fitting
from specsim.learn.space import cap_depth
from specsim.policy.base import Policy, Settings, build_policy
from specsim.policy.registry import PolicyName, find_policy, make_policy
from specsim.replaying.table import cost_table
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, as_schedule
from specsim.serving.rules.registry import find_rule, make_rule
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

PolicyOrRule = PolicyName | Policy | DraftLengthRule | type[DraftLengthRule] | Mapping[int, int]


def cost_notes(
    model: CostModel, trace: Trace, longest: int, batch: int, contexts: Sequence[int] = ()
) -> tuple[str, ...]:
    """Notes of the cost model on drafts and batches up to these sizes, at these contexts or those of the trace."""
    met = contexts or context_range(trace)
    return tuple(with_batch(model, batch).notes(longest, (min(met), max(met))))


def fit_policies(
    trace: Trace,
    cost: CostModel,
    requested: Sequence[tuple[PolicyOrRule, Settings]],
    *,
    tuning_share: float,
    seed: int,
) -> tuple[Trace, list[Policy | DraftLengthRule], int]:
    """Return the sequences to report on, the policies or rules, and the number of sequences that they learned from.

    If a policy learns, it does so on part of the sequences, at the costs of batch size 1, and all policies are reported
    on the others.
    """
    policies = [_resolve(policy, settings) for policy, settings in requested]
    rest, train = trace, trace
    learns = any(isinstance(policy, type) and _learns(policy) for policy in policies)
    if learns:
        tuning, others = split_sequences(trace, tuning_share=tuning_share, seed=seed)
        rest, train = trace.select(others), trace.select(tuning)
    ready = [_ready(policy, settings, train, cost) for policy, (_, settings) in zip(policies, requested, strict=True)]
    return rest, ready, train.sequences if learns else 0


def _learns(kind: type[Policy] | type[DraftLengthRule]) -> bool:
    return kind.learns if issubclass(kind, DraftLengthRule) else needs_fitting(kind)


def _ready(
    policy: Policy | DraftLengthRule | type[Policy] | type[DraftLengthRule],
    settings: Settings,
    train: Trace,
    cost: CostModel,
) -> Policy | DraftLengthRule:
    if isinstance(policy, Policy | DraftLengthRule):
        return policy
    if issubclass(policy, DraftLengthRule):
        return make_rule(policy, settings, train, batch_cost(cost))
    arguments = {**cap_depth(policy, train.depth), **settings}
    if needs_fitting(policy):
        return fit(policy, arguments, train, cost_table(train, cost))
    return build_policy(policy, arguments)


def _resolve(
    policy: PolicyOrRule, settings: Settings
) -> Policy | DraftLengthRule | type[Policy] | type[DraftLengthRule]:
    """A policy or rule with its settings, or the class of one that has none yet."""
    if isinstance(policy, Policy):
        return make_policy(policy, settings)
    if isinstance(policy, Mapping | DraftLengthRule):
        if settings:
            raise InputError(f"a schedule or a finished rule takes no settings; leave out {', '.join(settings)}")
        return as_schedule(policy) if isinstance(policy, Mapping) else policy
    if isinstance(policy, str | PathLike) and (rule := find_rule(policy)) is not None:
        return rule
    return policy if isinstance(policy, type) and issubclass(policy, DraftLengthRule) else find_policy(policy)
