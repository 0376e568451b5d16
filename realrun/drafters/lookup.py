"""Prompt lookup (Saxena 2023) as a drafter: it copies what followed an earlier occurrence of the last n tokens.

The rule is that of `specsim.lookup.ngram`: n from 3 down to 1, the most recent occurrence, copied on past its end. On
the lab's prompts, with greedy drafts of 8 tokens, a round emits 2.91 tokens by the first occurrence, 2.87 by the most
recent occurrence, and 3.19 if copying continues past its end: a near occurrence is likely to repeat, but leaves few
tokens to copy otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft import Draft, KeepDrafting
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterFacts, DrafterKind, Origin
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.lm.clock import now
from realrun.proposals.recorder import Columns, Recorder, RecordRequest
from specsim.io.errors import InputError
from specsim.lookup.ngram import RULES, NgramIndex, lookup_columns
from specsim.policy.chain.base import Step
from specsim.policy.tree.base import TreePolicy

RULE = RULES["specsim"]


def step_of(index: NgramIndex, depth: int) -> Step:
    """Make the features of the depth-th token, with numbers as in traces."""
    prob = index.prob(depth)
    seen, entropy_nats = float(np.float32(prob)), float(np.float32(index.entropy_nats(prob)))
    return Step(seen, seen, entropy_nats, score=0.0, top10_confidence=0.0)


class LookupDrafter(DraftModel):
    """Drafts what `NgramIndex` predicts, or nothing where there is no match; chains only, without scores.

    In rejection mode a token is drawn from a distribution of that token alone.

    lm : the target's pass; the drafter has no pass and no cache of its own
    """

    def __init__(self, target: CachedLM, eos_token_ids: Sequence[int]):
        super().__init__(target, eos_token_ids)
        self.index = NgramIndex(int(target.model.config.vocab_size), RULE)

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        if "top10_confidence" in features:
            raise InputError(
                "the policy reads the probabilities of the ten likeliest tokens, prompt lookup predicts only one; "
                "choose another policy"
            )
        if "score" in features:
            raise InputError(
                "the policy reads the score of an acceptance predictor, and prompt lookup has no states to "
                "score; choose another policy"
            )

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        self.index = NgramIndex(self.index.vocabulary, RULE)
        self.index.extend(context)

    def foretold(self, tokens: Sequence[int]) -> float:
        self.index.extend(tokens[len(self.index.text) :])
        return step_of(self.index, 1).prob if self.index.matched else 0.0

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        """Draft 0 to `context.limit` tokens after `tokens`, which continue those of the last call."""
        draft, index = Draft(), self.index
        start = now()
        index.extend(tokens[len(index.text) :])
        if not index.matched:
            return draft
        while True:
            depth = len(draft.tokens) + 1
            token, step = index.token(depth), step_of(index, depth)
            if context.sampler.mode == "rejection":
                draft.probs.append(self._certain(token))
            draft.parents.append(depth - 2)
            draft.tokens.append(token)
            draft.steps.append(step)
            drafted = now()
            draft.step_s.append(drafted - start)
            if depth == context.limit or token in self.eos_token_ids:
                return draft
            proceed = keep(step, depth)
            start = now()
            draft.asked += 1
            draft.policy_s += start - drafted
            if not proceed:
                return draft

    def _certain(self, token: int) -> torch.Tensor:
        probs = torch.zeros(self.index.vocabulary, device=self.lm.device)
        probs[token] = 1.0
        return probs

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        """Do nothing: there is no cache."""

    def prepare_tree(self, policy: TreePolicy, length: int) -> None:
        raise InputError(f"policy {policy.name} drafts trees, prompt lookup chains only; choose another policy")


def _columns(vocabulary: int, request: RecordRequest) -> Columns:
    """Record what is proposed at every position; a `Recorder` once the vocabulary's size is given."""
    assert request.tree is None, "prompt lookup drafts chains"
    return lookup_columns(RULE, vocabulary, request.prompt, request.output, request.depth)


@dataclass(frozen=True, eq=False)
class LookupKind(DrafterKind):
    """Prompt lookup, which any target has."""

    name: ClassVar[str] = "lookup"
    origin: ClassVar[Origin] = "target"
    trees: ClassVar[bool] = False
    has_states: ClassVar[bool] = False
    needs_own_pass: ClassVar[bool] = False

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        return target, cls()

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        lm = make_lm(target)
        return lm, LookupDrafter(lm, eos_token_ids)

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        if sampler.mode == "rejection":
            raise InputError(
                "prompt lookup is not recorded in rejection mode; --mode greedy-draft accepts the same drafts"
            )
        return partial(_columns, int(target.config.vocab_size))

    @property
    def facts(self) -> DrafterFacts:
        return {"longest_ngram": RULE.max_ngram}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (target,)

    def profiling_text(self, tokens: list[int]) -> list[int]:
        """Repeat the first token because lookup drafts only what the text repeats."""
        return tokens[:1] * len(tokens)
