"""Tokens that every sequence of a trace drafts and has accepted, round by round, when it is decoded in a batch.

Under lossless decoding the other sequences of a batch change when a round happens and how long it takes, not what it
drafts. A policy that looks at neither costs nor load has therefore the rounds of its replay in any batch; a rule that
follows the load chooses draft lengths in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specsim.cost.model import SPACE, ConstantCost
from specsim.cost.table import refeeds
from specsim.io.arrays import Bools, FloatArray, IntArray, Ints
from specsim.io.errors import InputError
from specsim.policy.base import BIASED, Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.tree.static import StaticTree
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.replay import bind_kernel
from specsim.replaying.rounds import RoundLog, Sums
from specsim.replaying.table import cost_table
from specsim.replaying.tree import Links, links
from specsim.serving.costs import draft_levels
from specsim.serving.draft_length import DraftLengthRule, DraftRounds, Running, State, fixed_length
from specsim.trace.accepted import rule_of
from specsim.trace.trace import OPTIONAL_LISTS, STEP_LISTS, Trace


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafts of every sequence, by the row of the trace at which a round starts.

    rule : chooses draft lengths by the load
    limit, match : int [N], most tokens drafted at each row, and how many of them are accepted
    rows : int [R], rows at which rounds start, where they are known ahead because the rule does not follow the load
    tree : that every draft is of, cut where the budget ends; None for chains
    leaf : bool [N], whether the accepted path of the tree ends at a leaf
    survival : [N, D], of the tokens of a draft, as the rule reads it; None where it reads no confidence
    masks : of SPACE, in a pass behind the pending token and each verified token; 0 for other drafters
    """

    trace: Trace
    label: str
    rule: DraftLengthRule
    limit: IntArray
    match: IntArray
    rows: Ints | None = None
    tree: Links | None = None
    leaf: Bools | None = None
    survival: FloatArray | None = None
    masks: int = 0

    def draft(self, k: int | Ints, sequence: Ints, row: Ints) -> tuple[Ints, Ints]:
        """Drafted tokens of the rounds at these rows, and how many of them would be accepted."""
        drafted = np.minimum(k, self.limit[row])
        return drafted, np.minimum(drafted, self.match[row])

    def behind_after(self, row: Ints, behind: Ints, drafted: Ints, accepted: Ints, k: int | Ints) -> Ints:
        """Tokens besides the pending token that the drafter has yet to take in after these rounds.

        A round without speculation adds its token to them. A round that drafts leaves the last token of a draft that
        is accepted whole, or of a tree's path that ends at a leaf. SPACE has no drafter that could be behind.
        """
        if self.masks:
            return np.zeros_like(behind)
        whole = (drafted > 0) & (draft_levels(drafted, self.tree) == accepted)
        if self.leaf is not None:
            whole |= (accepted > 0) & self.leaf[row]
        return np.where(np.asarray(k) == 0, behind + 1, whole)

    def propose(
        self, state: State, running: Running, sequence: Ints, row: Ints, reshaped: Bools | None = None
    ) -> Proposal:
        """Draft for a round of each of these sequences.

        state, running : what the rule has learned, and what it may know about the requests
        reshaped : whether an output is longer or shorter than recorded, so that its drafts are cut to what remains
        """
        rule = self.rule
        if rule.foresees:
            reachable = np.minimum(self.limit[row], running.remaining - 1)
            running = running._replace(match=np.minimum(self.match[row], reachable))
        chosen = rule.choose(state, running) if row.size else 0
        k = chosen.astype(np.int64) if isinstance(chosen, np.ndarray) else np.full(len(row), chosen)
        drafted, match = self.draft(k, sequence, row)
        if reshaped is not None:
            drafted = np.where(reshaped, np.minimum(drafted, running.remaining - 1), drafted)
        verified, survival = drafted, None
        if self.survival is not None and drafted.any():
            survival = self.survival[row]
            drafted = grow(rule, state, running, survival, drafted)
            survival = shown(survival, drafted, int(drafted.max()))
            if not rule.trims_filled_steps:
                verified = np.minimum(rule.verify(state, running, survival, drafted), drafted)
        return Proposal(k, drafted, verified, match, survival)

    def decode(self, state: State, running: Running, sequence: Ints, row: Ints) -> DraftRounds:
        """Decode a round of each of these sequences."""
        k, drafted, verified, match, survival = self.propose(state, running, sequence, row)
        if survival is not None and self.rule.trims_filled_steps:
            verified = np.minimum(self.rule.verify(state, running, survival, drafted), drafted)
        accepted = np.minimum(match, draft_levels(verified, self.tree))
        emitted = np.minimum(accepted + 1, running.remaining)
        behind = self.behind_after(row, running.behind, drafted, accepted, k)
        following = row + emitted
        begin, end = self.trace.offsets[sequence], self.trace.offsets[sequence + 1]
        following = np.where(following >= end, begin, following)
        return DraftRounds(drafted, verified, accepted, emitted, behind, following, bool(k.any()), survival)


class Proposal(NamedTuple):
    """Drafts of several requests, [R] per array.

    k : draft length that the rule chose
    drafted, verified : tokens
    match : drafted tokens that would be accepted if the whole draft were verified
    survival : as in `DraftRounds`
    """

    k: Ints
    drafted: Ints
    verified: Ints
    match: Ints
    survival: FloatArray | None


def grow(rule: DraftLengthRule, state: State, running: Running, survival: FloatArray, most: Ints) -> Ints:
    """Draft while the rule goes on. most : [R], tokens as chosen before the draft"""
    drafted = np.minimum(most, 1)
    for depth in range(1, int(most.max())):
        going = (drafted == depth) & (most > depth)
        if not going.any():
            break
        going &= rule.go_on(state, running, shown(survival, drafted, depth), drafted, going)
        drafted = drafted + going
    return drafted


def shown(survival: FloatArray, drafted: Ints, depth: int) -> FloatArray:
    """Survival [R, depth] of the tokens drafted so far, 0 of others: a rule sees no further than an engine."""
    return np.where(np.arange(depth) < drafted[:, None], survival[:, :depth], 0.0)


Arm = Policy | DraftLengthRule | None  # None is decoding without speculation


def drafts_of(trace: Trace, arm: Arm, *, seed: int = 0, served: bool = False) -> Drafts:
    """The drafts of a policy, of a rule that follows the load, or of neither.

    On a trace of rejection sampling, those of the first outcome under this seed.

    served : by an engine whose prefill emits the first token, so that rounds begin after it
    """
    if arm is not None and refeeds(trace):
        raise InputError(
            "the target of this trace has recurrent layers, and batches do not price the second pass that follows a "
            "rejection; take a single sequence at a time (`specsim tune`, `specsim replay`)"
        )
    if served and isinstance(arm, FixedK) and trace.drafter_kind != SPACE:  # so that the engine can cut it
        return replace(_of_rule(trace, fixed_length(arm.k)), label=str(arm))
    if isinstance(arm, Policy):
        return _of_policy(trace, arm, seed, served)
    if arm is not None:
        return _of_rule(trace, arm)
    nothing = np.zeros(len(trace.token), dtype=np.uint8)
    rows = None if served else np.arange(len(trace.token))
    return Drafts(trace, "no speculation", fixed_length(0), nothing, nothing, rows=rows)


def _of_policy(trace: Trace, policy: Policy, seed: int, served: bool) -> Drafts:
    """Drafts of a policy whose state starts anew in each sequence.

    Raises InputError where the length of a draft does not tell its passes: for trees that grow by what the drafter
    says, and for policies that drop drafted tokens. SPACE's passes follow from the policy's longest draft k: a group of
    k masks behind the pending token and each verified token.
    """
    if not isinstance(policy, ChainPolicy | StaticTree):
        raise InputError(
            f"policy {policy.name}: batches support chain policies and static trees only, not trees that grow by "
            "confidence; choose another policy"
        )
    rides = isinstance(policy, SpaceK) or trace.drafter_kind == SPACE
    if isinstance(policy, ChainPolicy) and policy.drops_refused:
        raise InputError(
            f"policy {policy.name}: batches support only chains that are verified whole; choose another policy"
        )
    check_replayable(trace, policy)
    run, table = bind_kernel(policy), cost_table(trace, ConstantCost(1.0, 1.0))  # decisions do not see these costs
    check_covered(trace, policy, table)
    part, kept = _behind_first_tokens(trace) if served else (trace, np.arange(len(trace.token)))
    log, count = RoundLog.zeros(len(part.token)), 0
    sequences = np.arange(part.sequences)
    for which in sequences[:, None] if policy.carries_state else [sequences]:
        count += run(part, table, seed, which, Sums.zeros(len(which)), log[count:])
    log = log[:count]
    rows = kept[part.offsets[log.sequence] + log.t]
    limit, match = np.zeros((2, len(trace.token)), dtype=np.int64)
    limit[rows], match[rows] = log.drafted, log.accepted
    tree = links(policy.shape) if isinstance(policy, StaticTree) else None
    leaf = None
    if tree is not None:
        leaf = np.zeros(len(trace.token), dtype=np.bool_)
        leaf[rows] = tree.children[log.last] == 0
    always = fixed_length(max(1, int(limit.max(initial=0))))
    masks = policy.max_draft_tokens if rides else 0
    return Drafts(trace, str(policy), always, limit, match, rows, tree, leaf, masks=masks)


def _behind_first_tokens(trace: Trace) -> tuple[Trace, Ints]:
    """The trace without the first token of every output, and the rows of the trace that are kept."""
    part = trace.select(np.flatnonzero(trace.output_tokens > 1))
    rows = part.position > 0
    names = ("token", "match_len", *STEP_LISTS, *OPTIONAL_LISTS)
    offsets = np.append(0, np.cumsum(part.output_tokens - 1))
    rest = part.with_columns(
        names, lambda column: column[rows], offsets=offsets, budget_tokens=part.budget_tokens - 1, tree=None
    )
    longer = np.repeat(trace.output_tokens > 1, trace.output_tokens)
    return rest, np.flatnonzero(longer & (trace.position > 0))


def _of_rule(trace: Trace, rule: DraftLengthRule) -> Drafts:
    if rule.max_draft_tokens > trace.depth:
        raise InputError(
            f"{rule.label} drafts up to {rule.max_draft_tokens} tokens, the trace is recorded to depth {trace.depth}; "
            "lower the limit or record deeper"
        )
    if trace.drafter_kind == SPACE:
        raise InputError(
            f"{rule.label}: SPACE drafts as it verifies, so that the next draft cannot follow the load; choose a "
            "policy, such as space_k"
        )
    survival = rule.survival(trace)
    if survival is not None and rule.biases_sampled_drafts and rule_of(trace) == "sampled-draft":
        raise InputError(f"rule {rule.label}: {BIASED}")
    return Drafts(trace, rule.label, rule, trace.draft_limit, trace.match_len, survival=survival)
