"""Vanilla speculative decoding's drafter: an independent draft model, for chains and trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from realrun.decode.acceptance_predictor import Predictor, score_of
from realrun.decode.draft import Draft, KeepDrafting, Siblings
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import BLOCK, Sampler, compared_in, gumbel_noise
from realrun.decode.tree_growth import TreeGrower
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.lm.clock import now
from realrun.lm.number_type import refuse_logits
from realrun.lm.static.sizes import Mirrored
from specsim.io.errors import InputError
from specsim.policy.chain.base import Step
from specsim.policy.tree.base import TreePolicy


class StepDescription:
    """Statistics [c] of a chain's draft step in greedy and Gumbel mode, a `realrun.lm.cached.Describe`.

    Token, its probability, the largest probability, entropy in nats; then the predictor's score and the top-10
    confidence, if requested. Everything that changes from step to step and from round to round is read at fixed
    addresses, so that CUDA graphs can record it with the pass.

    room : number of output positions that there is noise for
    """

    def __init__(self, lm: CachedLM, sampler: Sampler, room: int, predictor: Predictor | None, weighing_top10: bool):
        self.sampler, self.room, self.predictor, self.weighing_top10 = sampler, room, predictor, weighing_top10
        self._vocab, self._type = int(lm.model.config.vocab_size), compared_in(lm.model.dtype)
        self._device, self._sequence = lm.device, -1
        rows = room if sampler.mode == "gumbel" else 0
        self._noise = torch.empty(rows, self._vocab, dtype=self._type, device=lm.device)
        # The place in the text of output position 0, and of the first token that the round drafts.
        self._places, self._known = Mirrored([2], torch.int64, lm.device), (0, 0)
        if predictor is not None:
            self._by_target = predictor.bias.clone()[None]  # [1, M]

    def begin_sequence(self, sequence: int) -> None:
        """Load a sequence's noise, before timing starts where the sequence is known by then."""
        if sequence == self._sequence:
            return
        self._sequence = sequence
        for start in range(0, len(self._noise), BLOCK):
            part = self._noise[start : start + BLOCK]
            seed = self.sampler.seed
            part.copy_(gumbel_noise(seed, sequence, start, len(part), self._vocab, self._device, self._type))

    def begin_round(self, context: RoundContext, tokens: int, target_hidden: torch.Tensor | None) -> None:
        """Prepare steps that draft after a text of this many tokens."""
        self.begin_sequence(context.sequence)
        places = tokens - context.position, tokens if self.predictor is not None else 0
        if places != self._known:
            self._places.put(places)
            self._known = places
        if self.predictor is not None:
            self._by_target.copy_(
                self.predictor.after(None if target_hidden is None else target_hidden[None]).by_target
            )

    def __call__(self, logits: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        first, start = self._places.tensor
        noise = None
        if self.sampler.mode == "gumbel":
            noise = self._noise[(position + 1 - first).clamp(0, self.room - 1)]
        parts = [self.sampler.statistics_with(logits, noise)[0]]
        if self.predictor is not None:
            depth = (position + 1 - start).clamp(0, self._by_target.shape[1] - 1)
            parts.append(score_of(self._by_target[0, depth], hidden, self.predictor.draft_weight))
        if self.weighing_top10:
            parts.append(self.sampler.top10_confidence(logits))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class DraftModel:
    """An independent model with the target's tokenizer (Leviathan et al. 2023).

    Drafters inside the target give their own pass, a `CachedLM`, in place of the model.

    max_depth : maximum number of levels to draft, None for no limit
    scoring : whether the predictor's scores are computed
    weighing_top10 : whether `Step.top10_confidence` is computed
    predictor : scores every drafted token of a chain, for policies that read scores
    siblings : how the children of a tree's node are drafted in rejection mode. Drawn siblings must all
        be verified, so that only top_k serves every policy. Other modes always use top_k
    wants_target_hidden : whether `begin`, `commit` and `commit_tree` need the target's last state [d_T]
        at the position that produced the newest output token; scores need it
    """

    max_depth: int | None = None

    def __init__(
        self,
        model: PreTrainedModel | CachedLM,
        eos_token_ids: Sequence[int],
        predictor: Predictor | None = None,
        siblings: Siblings = "top_k",
    ):
        self.lm = model if isinstance(model, CachedLM) else make_lm(model)
        self.siblings = siblings
        self.eos_token_ids = frozenset(eos_token_ids)
        self.predictor = None if predictor is None else predictor.cast(self.lm.device, self.lm.model.dtype)
        self.wants_target_hidden = self.scoring = self.weighing_top10 = False
        self._target_hidden: torch.Tensor | None = None
        self._descriptions: dict[tuple[Sampler, bool, bool], StepDescription] = {}

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        """Prepare, before timing starts, sequences of `length` tokens, `positions` of them output.

        features : what the policy reads; "score" and "top10_confidence" are computed only if they are among them
        """
        if "score" in features and self.predictor is None:
            raise InputError(
                "the policy reads the score of an acceptance predictor and this drafter has none; give one with "
                "--predictor, made by `realrun train predictor`"
            )
        self.enable_scores("score" in features)
        self.weighing_top10 = "top10_confidence" in features
        feeds, model = (1, 2), self.lm.model  # a fully accepted draft leaves two tokens to feed
        self.lm.warm(feeds, length)
        sampler.prepare(sequence, positions, int(model.config.vocab_size), self.lm.device, model.dtype)
        description = self._description(sampler, positions)
        if description is not None:
            description.begin_sequence(sequence)
            self.lm.warm_description(feeds, description)

    def _description(self, sampler: Sampler, positions: int) -> StepDescription | None:
        """Get the statistics computed in the draft step's CUDA graph; None if the step runs without a graph.

        positions : number of output positions
        """
        if not self.lm.describes or sampler.mode == "rejection":
            return None
        key = sampler, self.scoring, self.weighing_top10
        description = self._descriptions.get(key)
        if description is None or description.room < positions:
            if description is not None:
                self.lm.forget_description(description)
            room = -(-positions // BLOCK) * BLOCK
            description = StepDescription(
                self.lm, sampler, room, self.predictor if self.scoring else None, self.weighing_top10
            )
            self._descriptions[key] = description
        return description

    def enable_scores(self, scoring: bool) -> None:
        """Turn the computation of scores on or off."""
        self.scoring = self.wants_target_hidden = self.lm.keep_hidden = scoring

    def take_hidden(self, target_hidden: torch.Tensor | None) -> None:
        """Take up the target's last state [d_T] at the position that produced the pending token."""
        self._target_hidden = target_hidden

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        """Start a sequence; context holds its tokens except the pending token."""
        self.lm.reset()
        self.lm.prefill(context)
        self.take_hidden(target_hidden)

    def foretold(self, tokens: Sequence[int]) -> float:
        """Estimate, before drafting, how likely it predicts the next token; see `specsim.trace.joined.foretold`."""
        return 1.0

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        """Draft 1 to `limit` tokens after `tokens`, for output positions `position` and on, of this context.

        Stops at the limit, at an end-of-text token, or when `keep` returns False.
        """
        feed = tokens[self.lm.length :]
        draft = Draft(fed=len(feed))
        description = self._description(context.sampler, context.position + context.limit)
        if description is not None:
            description.begin_round(context, len(tokens), self._target_hidden)
        while True:
            start = now()
            described, probs = self._step(feed, context, len(draft.tokens) + 1, description)
            if probs is not None:
                draft.probs.append(probs)
            # The only copy from the device to the host in a draft step.
            token, *features = described.tolist()
            if token < 0 or math.isnan(features[0]):
                raise refuse_logits(self.lm, [*tokens, *draft.tokens], "drafter")
            draft.parents.append(len(draft.tokens) - 1)
            draft.tokens.append(int(token))
            # Traces hold float32, and replay must decide on the same numbers.
            prob, confidence, entropy_nats, *more = (float(np.float32(x)) for x in features)
            top10_confidence = more.pop() if self.weighing_top10 else 0.0
            score = more.pop() if self.scoring else 0.0
            step = Step(prob, confidence, entropy_nats, score, top10_confidence)
            draft.steps.append(step)
            drafted = now()
            draft.step_s.append(drafted - start)
            if len(draft.tokens) == context.limit or draft.tokens[-1] in self.eos_token_ids:
                return draft
            proceed = keep(step, len(draft.tokens))
            draft.asked += 1
            draft.policy_s += now() - drafted
            if not proceed:
                return draft
            feed = draft.tokens[-1:]

    def _step(
        self, feed: Sequence[int], context: RoundContext, depth: int, description: StepDescription | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft the token at this depth, from 1: statistics [c] and, in rejection mode, its distribution [V]."""
        if description is not None:
            return self.lm.describe(feed, description, follows=depth > 1), None
        logits = self.lm.forward(feed)[-1:]
        (described,), probs = context.sampler.draft(logits, context.sequence, context.position, depth)
        if self.scoring:
            described = torch.cat([described, self._score(depth)])
        if self.weighing_top10:
            described = torch.cat([described, context.sampler.top10_confidence(logits)])
        return described, None if probs is None else probs[0]

    def _score(self, depth: int) -> torch.Tensor:
        """Score [1] the token that the last pass drafted, at this depth of the round, from 1.

        In a tree's level this is the first node. The round's first pass may have fed tokens before it as well.
        """
        assert self.predictor is not None and self.lm.hidden is not None
        if depth == 1:
            hidden = self._target_hidden
            self._scorer = self.predictor.after(None if hidden is None else hidden[None])
        return self._scorer(self.lm.hidden[-1:] if depth == 1 else self.lm.hidden[:1], depth)

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        """Keep the cache of the first `length` tokens, which are now part of the output."""
        self.lm.truncate(length)
        self.take_hidden(target_hidden)

    @cached_property
    def _grower(self) -> TreeGrower:
        return TreeGrower(self.lm)

    def prepare_tree(self, policy: TreePolicy, length: int) -> None:
        """Prepare this policy's trees before timing starts, after `prepare`."""
        self._grower.warm(policy, length)

    def propose_tree(
        self,
        tokens: Sequence[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
    ) -> tuple[Draft, Any]:
        """Draft a tree of up to `limit` levels after `tokens`, for output positions `position` and on, of this context.

        Returns the draft, whose tokens the policy selected, and the policy's new state.
        """
        siblings = self.siblings if context.sampler.mode == "rejection" else "top_k"
        return self._grower.grow(tokens, context, policy, state, siblings, self._score if self.scoring else None)

    def commit_tree(self, path: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        """Keep the cache of the accepted nodes, numbered as in `Draft.nodes`."""
        self._grower.commit(path)
        self.take_hidden(target_hidden)
