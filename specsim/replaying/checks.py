"""Check that a trace and a cost table hold what the replay of a policy reads."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from specsim.cost.model import SPACE
from specsim.cost.table import CostTable, context_range
from specsim.io.errors import InputError
from specsim.policy.base import BIASED, Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.trace.accepted import rule_of
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace


def unsupported_reason(trace: Trace, kind: type[Policy]) -> str | None:
    """Return why this trace does not suit this kind of policy; None if it does."""
    drafter = trace.meta.get("drafter_kind", "chain")
    if issubclass(kind, SwitchPolicy) != isinstance(trace, JoinedTrace):
        if isinstance(trace, JoinedTrace):
            switching = "one_drafter, switch_match and the like"
            return f"drafts with a single drafter, but this joined trace has {len(trace.parts)}; choose {switching}"
        return "chooses among several drafters, but this trace has a single drafter; join traces with `specsim join`"
    if kind.drafter_kinds and drafter not in kind.drafter_kinds:
        return f"meant for drafters of kind {', '.join(kind.drafter_kinds)}; this trace's is {drafter}"
    if issubclass(kind, TreePolicy) and drafter == SPACE:
        return "the drafter of this trace drafts chains only"
    if issubclass(kind, TreePolicy) and trace.meta.get("recurrent_layers"):
        return f"the {trace.meta['recurrent_layers'][0]} of this trace has recurrent layers, which read no trees"
    if issubclass(kind, TreePolicy) and trace.sampled_by_rejection:
        return "trees are not replayed on a trace of rejection sampling; record with --mode greedy-draft"
    if kind.biases_sampled_drafts() and rule_of(trace) == "sampled-draft":
        return BIASED
    if not trace.informed and SIGNALS.intersection(kind.features):
        if "accepted_by" in trace.meta:
            return (
                f"reads the drafter's confidence, which {UNDER_ITS_OWN}; leave out --accept and --as, or take fixed_k"
            )
        model = trace.meta.get("synthetic", {}).get("model")
        whose = f"this trace's acceptance model, {model}," if model else "this trace"
        return f"reads the drafter's confidence, which {whose} lacks"
    missing = [name for name in kind.features if getattr(trace, name) is None]
    missing.sort(key=lambda name: name not in NEEDED)  # first the column that NEEDED explains
    if "tree" in missing and trace.meta.get("tree"):
        return f"reads the recorded trees, which {UNDER_ITS_OWN}; leave out --accept and --as"
    return f"needs {NEEDED.get(missing[0], f'the column {missing[0]!r}')}, which this trace lacks" if missing else None


SIGNALS = frozenset(Step._fields)  # of the drafter's confidence
UNDER_ITS_OWN = "this trace holds under the rule and the counting that it was recorded with alone"
NEEDED = {"tree": "recorded trees (`realrun record --tree-nodes`)"}


def check_replayable(trace: Trace, policy: Policy) -> None:
    """Raise InputError if the policy needs more than the trace records."""
    if isinstance(trace, JoinedTrace) or isinstance(policy, SwitchPolicy) or "accepted_by" in trace.meta:
        reason = unsupported_reason(trace, type(policy))
        if reason:
            raise InputError(f"policy {policy.name}: {reason}")
    if isinstance(trace, JoinedTrace) and isinstance(policy, SwitchPolicy) and policy.least_drafters > len(trace.parts):
        raise InputError(
            f"policy {policy}: the joined trace has {len(trace.parts)} drafters; choose a number up to that"
        )
    if policy.max_draft_tokens > trace.depth:
        raise InputError(
            f"policy {policy} drafts up to {policy.max_draft_tokens} tokens, the trace is recorded to depth "
            f"{trace.depth}; {_lowered(policy, lambda other: other.max_draft_tokens, trace.depth)}, or record deeper"
        )
    if isinstance(policy, TreePolicy):
        reason = unsupported_reason(trace, type(policy))
        if reason:
            raise InputError(f"policy {policy.name}: {reason}")
        if not policy.static and trace.tree is not None and policy.max_width > trace.tree.width:
            raise InputError(
                f"policy {policy} drafts up to {policy.max_width} children of a node, the trace is recorded to "
                f"{trace.tree.width}; {_lowered(policy, lambda other: other.max_width, trace.tree.width)}, or record "
                "wider (`realrun record --tree-width`)"
            )
        return
    if policy.biases_sampled_drafts() and rule_of(trace) == "sampled-draft":
        raise InputError(f"policy {policy.name}: {BIASED}")
    for name in policy.features:
        if getattr(trace, name) is None:
            raise InputError(f"policy {policy.name} needs the column {name!r}, which this trace lacks; record it")


def check_covered(trace: Trace, policy: Policy, table: CostTable) -> None:
    """Raise InputError if the replay could read beyond the cost table, which the kernel does not check."""
    longest = context_range(trace)[1]
    if table.verify_s.shape[1] <= longest >> table.bucket_bits or len(table.draft_s) <= policy.max_draft_tokens:
        raise InputError(
            f"cost table covers drafts of up to {len(table.draft_s) - 1} tokens and contexts below "
            f"{table.verify_s.shape[1] << table.bucket_bits}, the replay of {policy} needs {policy.max_draft_tokens} "
            f"and {longest}; compile it for this trace"
        )
    if isinstance(policy, ChainPolicy) and len(table.verify_s) < policy.max_draft_tokens + 2:
        raise InputError(
            f"cost table covers verification of up to {len(table.verify_s) - 1} tokens, the replay of {policy} needs "
            f"{policy.max_draft_tokens + 1}; compile it for this trace"
        )
    if isinstance(policy, TreePolicy):
        if table.tree is None:
            raise InputError(
                f"policy {policy.name}: the cost model does not price trees; run `realrun profile --tree-nodes`"
            )
        covered, asked = len(table.tree.verify_s) - 1, _pass_tokens(policy)
        if covered < asked:
            raise InputError(
                f"costs cover trees of up to {covered} tokens, policy {policy} may need {asked}; "
                f"{_lowered(policy, _pass_tokens, covered)}, or profile with a larger `realrun profile --tree-nodes`"
            )


def _pass_tokens(policy: TreePolicy) -> int:
    """Count the most tokens of a pass: verified nodes and the pending token, or expanded nodes in a draft pass."""
    return max(policy.max_verified_nodes + 1, policy.max_expanded)


def _lowered(policy: Any, asked: Callable[[Any], int], most: int) -> str:
    """Write which settings to lower so that a policy asks for at most `most` tokens.

    Each setting that suffices alone is named, else several together. Values are left out for a policy that learns,
    because they decide what it learns.
    """
    fields = dataclasses.fields(policy)
    whole = [field for field in fields if type(field.default) is int]
    if any(type(field.default) is tuple for field in fields):
        return f"lower {' or '.join(field.name for field in whole) or 'its limit'}"

    def asks(changes: dict[str, int]) -> int:
        try:
            return asked(dataclasses.replace(policy, **changes))
        except InputError:
            return most + 1

    enough = []
    for field in whole:
        lower = [{field.name: value} for value in range(int(field.metadata["low"]), getattr(policy, field.name))]
        fitting = bisect_right(lower, most, key=asks)  # a lower setting asks for less
        if fitting and asks(lower[fitting - 1]) <= most:
            enough.append(_given(lower[fitting - 1]))
    if enough:
        return f"give {' or '.join(enough)}"
    together = {field.name: most for field in whole if getattr(policy, field.name) > most}
    for name in list(together):
        others = {other: value for other, value in together.items() if other != name}
        together = others if asks(others) <= most else together
    return f"give {_given(together)}" if together else "lower its limit"


def _given(settings: dict[str, int]) -> str:
    return " ".join(f"--set {name}={value}" for name, value in settings.items())
