"""The forms in which policies are compared: which of them a trace can serve, and their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from specsim.cost.model import CostModel
from specsim.fitting.fit import fit
from specsim.policy.base import Policy, Variant
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from specsim.tuning.search import best_policy, fixed_settings
from specsim.tuning.settings import SearchSettings
from specsim.tuning.space import cap_depth, depth_bounds

Form = tuple[type[Policy], Variant]


def applicable_variants(
    trace: Trace, kinds: Iterable[type[Policy]], cost: CostModel
) -> tuple[list[Form], list[tuple[str, str]]]:
    """All variants of these policies that trace and costs can serve, and (policy, reason) of the others."""
    found: list[Form] = []
    skipped: list[tuple[str, str]] = []
    for kind in kinds:
        reason = unsupported_reason(trace, kind)
        if not reason and issubclass(kind, TreePolicy) and cost.max_tree_tokens <= trace.depth + 1:
            covered = cost.max_tree_tokens
            reason = f"these costs cover trees of up to {covered} tokens; profile with `realrun profile --tree-nodes`"
        if reason:
            skipped.append((kind.name, reason))
            continue
        for variant in kind.variants:
            deep = [field.name for field in depth_bounds(kind) if variant.fixed.get(field.name, 0) > trace.depth]
            if deep:
                reason = f"{deep[0]} = {variant.fixed[deep[0]]} is more than the {trace.depth} tokens drafted here"
                skipped.append((label(kind, variant), reason))
            else:
                found.append((kind, variant))
    return found, skipped


def label(kind: type[Policy], variant: Variant) -> str:
    """What a form is called in tables."""
    return f"{kind.name}, {variant.label}"


def fit_variant(
    kind: type[Policy],
    variant: Variant,
    train: PricedTrace,
    settings: SearchSettings,
) -> Policy:
    """The policy in this form: tuned on `train`, or with its defaults, drafts as long as the trace is deep."""
    if variant.tuned:
        return best_policy(kind, train, dataclasses.replace(settings, fixed=variant.fixed))
    depth = train.trace.depth
    given = {**cap_depth(kind, depth), **fixed_settings(kind, variant.fixed, depth)}
    return fit(kind, given, train.trace, train.table())
