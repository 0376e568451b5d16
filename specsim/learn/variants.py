"""Variants in which policies are compared: which of them a trace can serve, and their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from specsim.cost.model import CostModel
from specsim.learn.fit import fit
from specsim.learn.search import finished_search, fixed_settings
from specsim.learn.settings import SearchSettings
from specsim.learn.space import bounded, recorded_limits, within
from specsim.policy.base import Policy, Variant
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace

Form = tuple[type[Policy], Variant]


def applicable_variants(
    trace: Trace, kinds: Iterable[type[Policy]], cost: CostModel
) -> tuple[list[Form], list[tuple[str, str]]]:
    """All variants of these policies that trace and costs can serve, and (policy, reason) of the others."""
    forms: list[Form] = []
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
            most = bounded(kind, {"depth": trace.depth})
            deep = [name for name, depth in most.items() if variant.fixed.get(name, 0) > depth]
            if deep:
                reason = f"{deep[0]} = {variant.fixed[deep[0]]} is more than the {trace.depth} tokens drafted here"
                skipped.append((label(kind, variant), reason))
            else:
                forms.append((kind, variant))
    return forms, skipped


def label(kind: type[Policy], variant: Variant) -> str:
    """Name of a variant in tables."""
    return f"{kind.name}, {variant.label}"


def fit_variant(
    kind: type[Policy],
    variant: Variant,
    train: PricedTrace,
    settings: SearchSettings,
) -> Policy:
    """Build the policy of this variant: tuned on `train`, or with its defaults and drafts up to the trace's depth."""
    return fit_counted(kind, variant, train, settings)[0]


def fit_counted(
    kind: type[Policy], variant: Variant, train: PricedTrace, settings: SearchSettings
) -> tuple[Policy, int]:
    """Fit as `fit_variant` does, and count the searched settings that the recorded trees were too small for."""
    if variant.tuned:
        search_result = finished_search(kind, train, dataclasses.replace(settings, fixed=variant.fixed))
        return search_result.best, search_result.truncated
    limits = recorded_limits(train)
    given = {**within(kind, limits), **fixed_settings(kind, variant.fixed, limits)}
    return fit(kind, given, train.trace, train.table()), 0
