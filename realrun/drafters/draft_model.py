"""Vanilla speculative decoding's drafter: an independent draft model, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedModel

from realrun.choice import Choice
from realrun.open_lm import open_lm
from specsim.policy import Step

KeepDrafting = Callable[[Step, int], bool]  # (the token just drafted, its depth from 1)


@dataclass
class Draft:
    """What a drafter proposes for one round; a chain is a path in a tree.

    tokens, parents : [k], the parent of node i is node parents[i], or -1 for the pending token
    steps : [k], features of each token
    policy_s : seconds spent in the stopping policy; step_s : [k], seconds of each draft step
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    policy_s: float = 0.0


class DraftModel:
    """An independent model with the target's tokenizer (Leviathan et al. 2023)."""

    kind = "chain"

    def __init__(self, model: PreTrainedModel, eos_token_ids: Sequence[int]):
        self.lm = open_lm(model)
        self.eos_token_ids = frozenset(eos_token_ids)

    def prepare(self, length: int, choice: Choice, sequence: int, positions: int) -> None:
        """Do ahead of the clock what sequences of `length` tokens, `positions` of them output, will need."""
        self.lm.warm((1, 2), length)  # a fully accepted draft leaves two tokens to feed
        model = self.lm.model
        choice.prepare(sequence, positions, int(model.config.vocab_size), self.lm.device, model.dtype)

    def begin(self, context: Sequence[int]) -> None:
        """Start a sequence whose tokens but the pending one are given."""
        self.lm.reset()
        self.lm.prefill(context)

    def propose(
        self,
        tokens: Sequence[int],
        limit: int,
        keep: KeepDrafting,
        choice: Choice,
        sequence: int,
        position: int,
    ) -> Draft:
        """Draft 1 to `limit` tokens after `tokens`, for output positions `position` and on.

        Stops at the limit, at an end-of-text token, or when `keep` says so.
        """
        draft = Draft()
        feed = tokens[self.lm.length :]
        while True:
            start = time.perf_counter()
            logits = self.lm.forward(feed)[-1:]
            # The only copy from the device to the host in a draft step.
            token, *features = choice.statistics(logits, sequence, position + len(draft.tokens))[0].tolist()
            draft.parents.append(len(draft.tokens) - 1)
            draft.tokens.append(int(token))
            # Traces hold float32, and both worlds must decide on the same numbers.
            prob, confidence, entropy_nats = (float(np.float32(x)) for x in features)
            step = Step(prob, confidence, entropy_nats, score=0.0)
            draft.steps.append(step)
            drafted = time.perf_counter()
            draft.step_s.append(drafted - start)
            if len(draft.tokens) == limit or draft.tokens[-1] in self.eos_token_ids:
                return draft
            proceed = keep(step, len(draft.tokens))
            draft.policy_s += time.perf_counter() - drafted
            if not proceed:
                return draft
            feed = draft.tokens[-1:]

    def commit(self, length: int) -> None:
        """Keep the cache of the first `length` tokens, which are now part of the output."""
        self.lm.truncate(length)
