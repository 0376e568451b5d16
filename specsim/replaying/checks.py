"""What a trace and a cost table have to hold for a policy to be replayed on them."""

from __future__ import annotations

from specsim.cost.contexts import context_range
from specsim.cost.model import SPACE
from specsim.cost.table import CostTable
from specsim.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace


def unsupported_reason(trace: Trace, kind: type[Policy]) -> str | None:
    """Why this kind of policy does not belong in a comparison on this trace; None if it does."""
    drafter = trace.meta.get("drafter_kind", "chain")
    if issubclass(kind, SwitchPolicy) != isinstance(trace, JoinedTrace):
        if isinstance(trace, JoinedTrace):
            switching = "one_drafter, switch_match and the like"
            return f"drafts with one drafter, this joined trace has {len(trace.parts)}; choose {switching}"
        return "chooses among several drafters, this trace has one; join traces with `specsim join`"
    if kind.drafter_kinds and drafter not in kind.drafter_kinds:
        return f"meant for drafters of kind {', '.join(kind.drafter_kinds)}; this trace's is {drafter}"
    if issubclass(kind, TreePolicy) and drafter == SPACE:
        return "the drafter of this trace drafts chains only"
    if issubclass(kind, TreePolicy) and trace.sampled_by_rejection:
        return "trees are replayed on greedy and Gumbel traces only; this one is of rejection sampling"
    model = trace.meta.get("synthetic", {})
    if not model.get("informed", True) and SIGNALS.intersection(kind.features):
        return f"reads how sure the drafter is, of which this trace's acceptance model, {model['model']}, says nothing"
    missing = [name for name in kind.features if getattr(trace, name) is None]
    return f"needs {NEEDED.get(missing[0], f'the column {missing[0]!r}')}, which this trace lacks" if missing else None


SIGNALS = frozenset(Step._fields)  # of how sure the drafter is
NEEDED = {"tree": "recorded trees (`realrun record --tree-nodes`)"}


def check_replayable(trace: Trace, policy: Policy) -> None:
    """InputError if the policy asks for what the trace does not hold."""
    if isinstance(trace, JoinedTrace) or isinstance(policy, SwitchPolicy):
        reason = unsupported_reason(trace, type(policy))
        if reason:
            raise InputError(f"policy {policy.name}: {reason}")
    if isinstance(trace, JoinedTrace) and isinstance(policy, SwitchPolicy) and policy.least_drafters > len(trace.parts):
        raise InputError(f"policy {policy}: the joined trace has {len(trace.parts)} drafters; name one of them")
    if policy.max_draft_tokens > trace.depth:
        raise InputError(
            f"policy {policy} drafts up to {policy.max_draft_tokens} tokens, the trace is recorded to depth "
            f"{trace.depth}; lower the limit or record deeper"
        )
    if isinstance(policy, TreePolicy):
        reason = unsupported_reason(trace, type(policy))
        if reason:
            raise InputError(f"policy {policy.name}: {reason}")
        if not policy.static and trace.tree is not None and policy.max_width > trace.tree.width:
            raise InputError(
                f"policy {policy} drafts up to {policy.max_width} children of a node, the trace is recorded to "
                f"{trace.tree.width}; lower the limit or record wider"
            )
        return
    for name in policy.features:
        if getattr(trace, name) is None:
            raise InputError(f"policy {policy.name} needs the column {name!r}, which this trace lacks; record it")


def check_covered(trace: Trace, policy: Policy, table: CostTable) -> None:
    """InputError if the replay could look up what the table does not hold; the kernel does not check."""
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
            raise InputError(f"policy {policy.name}: these costs are not of trees; use `realrun profile --tree-nodes`")
        covered, asked = len(table.tree.verify_s) - 1, max(policy.max_verified_nodes + 1, policy.max_expanded)
        if covered < asked:
            raise InputError(
                f"costs cover trees of up to {covered} tokens, policy {policy} may need {asked}; lower its limit or "
                "profile with a larger `realrun profile --tree-nodes`"
            )
