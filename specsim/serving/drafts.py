"""What every sequence of a trace drafts and has accepted, round by round, when it is decoded among others.

Under loss-free decoding neighbours change when a round happens and how long it takes, not what it drafts. A policy
that looks at neither costs nor load has therefore, in any batch, the rounds of its replay; a rule that follows the load
has those of a draft length of its own in every round.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from specsim.arrays import Ints
from specsim.cost.model import SPACE, ConstantCost
from specsim.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.tree.static import StaticTree
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.replay import bind_kernel
from specsim.replaying.rounds import RoundLog
from specsim.replaying.static_tree import Links, links
from specsim.replaying.sums import Sums
from specsim.replaying.table import cost_table
from specsim.serving.costs import draft_levels
from specsim.serving.draft_length import DraftLengthRule, fixed_length
from specsim.trace.outcomes import outcomes
from specsim.trace.trace import Trace


class KnownDrafts:
    """Rounds that are known before it is known which sequences share a batch; see `policy_drafts`, `plain_drafts`.

    tree : that every draft is of, cut where the budget ends; None for chains
    """

    def __init__(self, trace: Trace, label: str, log: RoundLog, *, speculates: bool, tree: Links | None = None) -> None:
        self.trace, self.label, self.speculates, self.tree = trace, label, speculates, tree
        self.rule = fixed_length(int(speculates))  # chooses nothing, but says whether rounds are of speculation
        self.t, self.drafted, self.accepted = (np.asarray(v, np.int64) for v in (log.t, log.drafted, log.accepted))
        counts = np.bincount(log.sequence, minlength=trace.sequences)
        self.offsets: Ints = np.append(0, counts.cumsum()).astype(np.int64)
        ends = np.append(self.t[1:], 0)
        ends[self.offsets[1:] - 1] = trace.output_tokens
        self.emitted: Ints = ends - self.t
        # The last token of a draft that is accepted whole is not in the draft cache, nor is that of a tree's path.
        whole = (self.drafted > 0) & (draft_levels(self.drafted, tree) == self.accepted)
        if tree is not None:
            whole |= (self.accepted > 0) & (tree.children[log.last] == 0)
        self.left: Ints = whole.astype(np.int64)  # after each round
        self.behind: Ints = np.append(0, self.left)[:-1]
        self.behind[self.offsets[:-1]] = 0

    @property
    def num_rounds(self) -> Ints:
        """Per sequence [S]."""
        return np.diff(self.offsets)

    def begin(self, sequence: int) -> int:
        """Where a sequence starts; of these drafts, its first round."""
        return int(self.offsets[sequence])

    def draft(self, k: int, sequence: Ints, place: Ints) -> tuple[Ints, Ints]:
        """Drafted and accepted tokens of the round at each place."""
        return self.drafted[place], self.accepted[place]

    def cut(self, drafted: Ints, tokens: Ints) -> Ints:
        """What is drafted of such drafts where so many tokens are left to draft."""
        if self.tree is None:
            return np.minimum(drafted, tokens)
        deepest = len(self.tree.level_end) - 1
        return np.minimum(drafted, self.tree.level_end[np.minimum(tokens, deepest)] - 1)

    def left_behind(self, place: Ints, behind: Ints, drafted: Ints, accepted: Ints, k: int) -> Ints:
        """As `tokens_behind`, after the rounds at these places."""
        return self.left[place]

    def advance(self, sequence: Ints, place: Ints, emitted: Ints) -> Ints:
        """The places after these rounds; a text that is over starts again."""
        following = place + 1
        return np.where(following == self.offsets[sequence + 1], self.offsets[sequence], following)


def policy_drafts(trace: Trace, policy: Policy, *, seed: int = 0) -> KnownDrafts:
    """The drafts of a policy of chains or of a static tree, of which every sequence has a copy that starts anew.

    On a trace of rejection sampling, the rounds of the first outcome. Raises InputError for trees that grow by what the
    drafter says, for policies that drop drafted tokens, and for drafters that draft in the verification pass: their
    draft passes are not known by the length of the draft.
    """
    if not isinstance(policy, ChainPolicy | StaticTree) or trace.meta.get("drafter_kind") == SPACE:
        raise InputError(
            f"policy {policy.name}: batches are of chains and static trees that a drafter drafts, not of trees that "
            "grow by confidence or of drafts that ride in the verification pass; give a policy of those"
        )
    if isinstance(policy, ChainPolicy) and policy.drops_refused:
        raise InputError(f"policy {policy.name}: batches are of chains that are verified whole; give another policy")
    check_replayable(trace, policy)
    run, table = bind_kernel(policy), cost_table(trace, ConstantCost(1.0, 1.0))  # decisions do not see these costs
    check_covered(trace, policy, table)
    log, rows = RoundLog.zeros(len(trace.token)), 0
    outcome = next(iter(outcomes(trace, seed)))
    together = np.arange(trace.sequences)
    for which in together[:, None] if policy.carries_state else [together]:
        rows += run(trace, table, outcome, which, Sums.zeros(len(which)), log[rows:])
    tree = links(policy.shape) if isinstance(policy, StaticTree) else None
    return KnownDrafts(trace, str(policy), log[:rows], speculates=True, tree=tree)


def plain_drafts(trace: Trace) -> KnownDrafts:
    """Decoding without speculation: a token a round."""
    log = RoundLog.zeros(len(trace.token))
    sequence = np.repeat(np.arange(trace.sequences), trace.output_tokens)
    return KnownDrafts(
        trace, "no speculation", dataclasses.replace(log, sequence=sequence, t=trace.position), speculates=False
    )


class RuleDrafts:
    """One K for all sequences of a batch, which a rule chooses by the load."""

    tree: Links | None = None

    def __init__(self, trace: Trace, rule: DraftLengthRule, *, seed: int = 0) -> None:
        if rule.max_draft_tokens > trace.depth:
            raise InputError(
                f"{rule.label} drafts up to {rule.max_draft_tokens} tokens, the trace is recorded to depth "
                f"{trace.depth}; lower the limit or record deeper"
            )
        if trace.meta.get("drafter_kind") == SPACE:
            raise InputError(f"{rule.label}: batches are of chains that a drafter drafts; SPACE drafts as it verifies")
        self.trace, self.rule, self.label, self.seed = trace, rule, rule.label, seed

    @cached_property
    def _match_len(self) -> Ints:
        return next(iter(outcomes(self.trace, self.seed)))[0].astype(np.int64)

    @cached_property
    def _draft_limit(self) -> Ints:
        return self.trace.draft_limit.astype(np.int64)

    def begin(self, sequence: int) -> int:
        """Where a sequence starts; of these drafts, its first position."""
        return int(self.trace.offsets[sequence])

    def draft(self, k: int, sequence: Ints, place: Ints) -> tuple[Ints, Ints]:
        """Drafted and accepted tokens of the round at each place."""
        drafted = np.minimum(k, self._draft_limit[place])
        return drafted, np.minimum(drafted, self._match_len[place])

    def cut(self, drafted: Ints, tokens: Ints) -> Ints:
        """What is drafted of such drafts where so many tokens are left to draft."""
        return np.minimum(drafted, tokens)

    def left_behind(self, place: Ints, behind: Ints, drafted: Ints, accepted: Ints, k: int) -> Ints:
        """As `tokens_behind`."""
        return tokens_behind(behind, drafted, accepted, k)

    def advance(self, sequence: Ints, place: Ints, emitted: Ints) -> Ints:
        """The places after these rounds; a text that is over starts again."""
        following = place + emitted
        return np.where(following >= self.trace.offsets[sequence + 1], self.trace.offsets[sequence], following)


Drafts = KnownDrafts | RuleDrafts
Arm = Policy | DraftLengthRule | None  # what decodes; None is decoding without speculation


def drafts_of(trace: Trace, arm: Arm, *, seed: int = 0) -> Drafts:
    """The drafts of a policy, of a rule that follows the load, or of neither."""
    if arm is None:
        return plain_drafts(trace)
    return policy_drafts(trace, arm, seed=seed) if isinstance(arm, Policy) else RuleDrafts(trace, arm, seed=seed)


def tokens_behind(behind: Ints, drafted: Ints, accepted: Ints, k: int) -> Ints:
    """Tokens beside the pending one that the drafter has yet to take in after a round.

    A round without speculation adds its token to them; one that drafts leaves the last token of a draft that is
    accepted whole.
    """
    return behind + 1 if k == 0 else ((drafted > 0) & (drafted == accepted)).astype(np.int64)
