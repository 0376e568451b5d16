"""Policies and rules that decode in batches, by name, class or object, fitted where they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.cost.contexts import context_range
from specsim.cost.files import with_batch
from specsim.cost.model import CostModel
from specsim.io.errors import InputError
from specsim.learn.fit import fit, needs_fitting
from specsim.learn.space import cap_depth
from specsim.policy.base import Policy, build_policy
from specsim.policy.registry import PolicyName, find_policy, make_policy
from specsim.replaying.table import cost_table
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, TurboSpec, as_schedule
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

TURBOSPEC = "turbospec"
TURBOSPEC_SETTINGS = {"max_draft_tokens": int, "accept_prob": float, "prior_tokens": float, "memory": float}
ArmLike = PolicyName | Policy | DraftLengthRule | Mapping[int, int]


def turbospec_rule(trace: Trace, cost: CostModel, settings: Mapping[str, Any]) -> TurboSpec:
    """Make the TurboSpec rule, with settings as values or text."""
    values: dict[str, Any] = {"max_draft_tokens": trace.depth}
    for key, value in settings.items():
        if key not in TURBOSPEC_SETTINGS:
            raise InputError(f"{TURBOSPEC} has no setting {key!r}; known: {', '.join(TURBOSPEC_SETTINGS)}")
        try:
            values[key] = TURBOSPEC_SETTINGS[key](value)
        except ValueError:
            raise InputError(f"{TURBOSPEC}: {key}={value!r} is not a number") from None
    return TurboSpec(batch_cost(cost), **values)


def cost_notes(
    model: CostModel, trace: Trace, longest: int, batch: int, contexts: Sequence[int] = ()
) -> tuple[str, ...]:
    """Notes of the cost model on drafts and batches up to these sizes, at these contexts or those of the trace."""
    met = contexts or context_range(trace)
    return tuple(with_batch(model, batch).notes(longest, (min(met), max(met))))


def choose_arms(
    trace: Trace, cost: CostModel, asked: Sequence[tuple[ArmLike, Mapping[str, Any]]], *, tuning_share: float, seed: int
) -> tuple[Trace, list[Policy | DraftLengthRule], int]:
    """Return the sequences to report on, the policies or rules, and the number of sequences that they learned from.

    If a policy learns, it does so on part of the sequences, at the costs of batch size 1, and all policies are reported
    on the others.
    """
    arms = [_arm(trace, cost, arm, settings) for arm, settings in asked]
    rest, train = trace, trace
    learns = any(isinstance(arm, type) and needs_fitting(arm) for arm in arms)
    if learns:
        tuning, others = split_sequences(trace, tuning_share=tuning_share, seed=seed)
        rest, train = trace.select(others), trace.select(tuning)
    ready: list[Policy | DraftLengthRule] = []
    for arm, (_, settings) in zip(arms, asked, strict=True):
        if not isinstance(arm, type):
            ready.append(arm)
            continue
        arguments = {**cap_depth(arm, trace.depth), **settings}
        fitted = needs_fitting(arm)
        ready.append(fit(arm, arguments, train, cost_table(train, cost)) if fitted else build_policy(arm, arguments))
    return rest, ready, train.sequences if learns else 0


def _arm(
    trace: Trace, cost: CostModel, arm: ArmLike, settings: Mapping[str, Any]
) -> Policy | DraftLengthRule | type[Policy]:
    """A policy or rule with its settings, or the class of a policy that has none yet."""
    if arm == TURBOSPEC:
        return turbospec_rule(trace, cost, settings)
    if isinstance(arm, Policy):
        return make_policy(arm, settings)
    if isinstance(arm, Mapping) or hasattr(arm, "choose"):  # a rule, perhaps a user's own
        if settings:
            raise InputError(f"a draft length by batch has no settings; leave out {', '.join(settings)}")
        rule: DraftLengthRule = as_schedule(arm) if isinstance(arm, Mapping) else arm  # type: ignore[assignment]
        return rule
    return find_policy(arm)
