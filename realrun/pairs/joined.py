"""Join several drafters over the same target; a switching policy chooses a drafter for every round.

Each drafter has a cache of its own. The first step of its next draft ingests what other drafters drafted since; prompt
lookup, which has no cache, reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft import Draft, KeepDrafting
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind
from realrun.lm.cached import CachedLM
from realrun.lm.clock import now
from realrun.pairs.pair import Pair
from realrun.proposals.recorder import Recorder
from specsim.io.errors import InputError
from specsim.policy.switch.base import SwitchPolicy, chosen, longest_draft
from specsim.replaying.kernel import step_functions
from specsim.trace.joined import JOINED, MAX_DRAFTERS


class JoinedDrafter(DraftModel):
    """Drafts with the drafter that `choose` chose last.

    lag : int [D], tokens of the text without the pending token that each drafter's cache lacks; for prompt lookup and
        drafters that make rows of the target's states in every round, tokens since it drafted last
    """

    def __init__(self, drafters: Sequence[DraftModel]):
        self.drafters = drafters
        self.lag = np.zeros(len(drafters), dtype=np.int64)
        self.active = self.drafted = self.length = self.asked = 0
        self.choice_s = 0.0

    @property
    def wants_target_hidden(self) -> bool:  # type: ignore[override]
        return any(drafter.wants_target_hidden for drafter in self.drafters)

    @property
    def lm(self) -> CachedLM:  # type: ignore[override]
        """Give the pass of the drafter with the fewest positions."""
        return min((drafter.lm for drafter in self.drafters), key=lambda lm: lm.max_positions)

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        for drafter in self.drafters:
            drafter.prepare(length, sampler, sequence, positions, features)

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        for drafter in self.drafters:
            drafter.begin(context, target_hidden)
        self.lag[:] = 0
        self.drafted, self.length = 0, len(context) + 1

    def choose(
        self, tokens: Sequence[int], context: RoundContext, policy: SwitchPolicy, state: Any
    ) -> tuple[Any, RoundContext]:
        """Choose the drafter of the next round; return the policy's new state, and the context with its limit."""
        start = now()
        emitted = len(tokens) - self.length
        self.lag += emitted
        if self.drafted:  # its last token was never fed
            self.lag[self.active] = int(emitted == self.drafted + 1)
        self.drafted, self.length = 0, len(tokens)
        foretold = np.array([drafter.foretold(tokens) for drafter in self.drafters])
        self.asked = int(foretold.any())
        if self.asked:
            self.active = int(step_functions(policy).choose(state, policy.params, foretold))
            state = chosen(state, self.active)
            context = context._replace(limit=min(context.limit, longest_draft(policy.params, self.active)))
        self.choice_s = now() - start
        return state, context

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        drafter = self.drafters[self.active]
        draft = drafter.propose(tokens, context, keep)
        draft.asked, draft.policy_s = draft.asked + self.asked, draft.policy_s + self.choice_s
        self.drafted = len(draft.tokens)
        draft.drafter = self.active + 1 if draft.tokens else 0
        if drafter.lm.reads_target_states:  # which it is fed in every round, those of tokens that it drafted itself too
            draft.fed = int(self.lag[self.active]) + 1
        return draft

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        for drafter in self.drafters:
            drafter.commit(length, target_hidden)


@dataclass(frozen=True, eq=False)
class JoinedKind(DrafterKind):
    """Several kinds over the same target. At most a single kind may run or read the target's own pass."""

    kinds: tuple[DrafterKind, ...]

    name: ClassVar[str] = JOINED
    trees: ClassVar[bool] = False
    has_states: ClassVar[bool] = False

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        parts = [kind.make_drafter(target, eos_token_ids, None) for kind in self.kinds]
        own = [lm for kind, (lm, _) in zip(self.kinds, parts, strict=True) if kind.needs_own_pass]
        return (own or [parts[0][0]])[0], JoinedDrafter([drafter for _, drafter in parts])

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        raise InputError(
            "several drafters are not recorded at once; record each, and join the traces by `specsim join`"
        )

    @property
    def max_depth(self) -> int | None:
        return min((kind.max_depth for kind in self.kinds if kind.max_depth is not None), default=None)

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return [module for kind in self.kinds for module in kind.weights(target)]


def join_pairs(pairs: Sequence[Pair]) -> Pair:
    """Join pairs of the same target into a pair whose decoder takes switching policies.

    Parameters
    ----------
    pairs : sequence of Pair
        Two or three, loaded `beside` the first, in the order of the joined trace.

    Returns
    -------
    Pair
        Its drafter is all of theirs.

    Raises
    ------
    InputError
        If they have different targets, several of them run or read the target's own pass, or one drafts in it (SPACE).

    Examples
    --------
    >>> import realrun
    >>> from specsim import make_policy
    >>> model = realrun.load_pair()
    >>> pair = realrun.join_pairs([realrun.load_pair(drafter="prompt-lookup", beside=model), model])
    >>> decoder = realrun.Decoder(*pair.make_drafter(), pair.eos_token_ids, realrun.Sampler())
    >>> len(decoder.decode([5, 6, 7], 8, make_policy("switch_match", {"k1": 2, "k2": 2})).tokens)
    8
    """
    first, names = pairs[0], ", ".join(pair.draft_name for pair in pairs)
    if not 2 <= len(pairs) <= MAX_DRAFTERS:
        raise InputError(f"{len(pairs)} drafters to join ({names}); give 2 to {MAX_DRAFTERS}")
    if any(pair.target is not first.target for pair in pairs):
        raise InputError(f"drafters {names} do not share one target; join drafters of the target as it is")
    if inside := [pair.draft_name for pair in pairs if pair.drafter.mask_groups]:
        raise InputError(f"cannot join {names}: {inside[0]} drafts inside the target's forward pass; remove it")
    own = [pair.draft_name for pair in pairs if pair.drafter.needs_own_pass]
    if len(own) > 1:
        raise InputError(
            f"drafters {', '.join(own)} each take part in the target's pass; join only one of them, with a draft "
            "model or prompt lookup"
        )
    return replace(first, drafter=JoinedKind(tuple(pair.drafter for pair in pairs)), draft_name=names, predictor=None)
