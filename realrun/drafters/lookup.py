"""Prompt lookup (Saxena 2023): draft what followed the text's last n tokens where they stood before, without a model.

The text is the prompt and the output so far. Of the n-grams at its end the longest that occurred
before counts, n from `MAX_NGRAM` = 3 down to 1, and of its occurrences the most recent one. What followed
it is drafted; where that reaches the text's end, it goes on with the drafted tokens themselves, as
LZ77 copies. Saxena's code and Hugging Face's `prompt_lookup_num_tokens` take the first occurrence
instead and stop at the text's end. On the lab's prompts, at drafts of 8 tokens, greedy, a round emits
2.91 tokens by the first occurrence, 2.87 by the most recent one and 3.19 if that is copied on: what is
near is likely to come again, but leaves few tokens to copy unless it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Predictor, Scorer
from realrun.decode.draft import Draft, KeepDrafting
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind, Origin
from realrun.lm.cached import CachedLM
from realrun.lm.open import make_lm
from realrun.proposals.recorder import Columns, Recorder
from realrun.proposals.trees import TreeSize
from specsim.errors import InputError
from specsim.policy.chain.base import Step
from specsim.policy.tree.base import TreePolicy
from specsim.trace.trace import NO_TOKEN, STEP_LISTS

MAX_NGRAM = 3  # tokens


class NgramIndex:
    """A growing text, with the place after the last occurrence of each of its n-grams.

    Everything that it answers depends on the text alone, so that a trace of every position holds it. A
    token more takes a few microseconds, however long the text is.

    matched : length of the longest n-gram at the text's end that occurred before, 0 if none did
    start : place of the token that followed it then
    hits, trials : [MAX_NGRAM + 1], by matched length: places of the text at which there was a match,
        and those of them whose next token was the one that it foretold
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.text: list[int] = []
        self.matched = self.start = 0
        self.hits, self.trials = [0] * (MAX_NGRAM + 1), [0] * (MAX_NGRAM + 1)
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, after = self.text, self._after
        for token in tokens:
            if self.matched:
                self.trials[self.matched] += 1
                self.hits[self.matched] += text[self.start] == token
            text.append(token)
            end = len(text)
            self.matched = 0
            for n in range(1, min(MAX_NGRAM, end) + 1):
                ngram = tuple(text[end - n :])
                if ngram in after:
                    self.matched, self.start = n, after[ngram]
                after[ngram] = end

    def token(self, depth: int) -> int:
        """The depth-th token, from 1, that the match foretells."""
        return self.text[self.start + (depth - 1) % (len(self.text) - self.start)]

    def step(self, depth: int) -> Step:
        """How sure the depth-th token is, if those before it are right: then one match is as long as the other.

        prob and confidence are the share of this text's matches of that length whose next token came,
        by Laplace's rule, (hits + 1) / (trials + 2). entropy_nats is that of the distribution which has
        this probability and spreads the rest evenly over the vocabulary. Numbers as traces hold them.
        """
        length = min(self.matched + depth - 1, MAX_NGRAM)
        prob = (self.hits[length] + 1) / (self.trials[length] + 2)
        rest = (1 - prob) / (self.vocabulary - 1)
        entropy_nats = -prob * math.log(prob) - (1 - prob) * math.log(rest)
        return Step(float(np.float32(prob)), float(np.float32(prob)), float(np.float32(entropy_nats)), score=0.0)


class LookupDrafter(DraftModel):
    """Drafts what `NgramIndex` foretells, or nothing where there is no match; chains only, and no scores.

    In rejection mode the distribution that a token is drawn from is certain of it.

    lm : the target's pass; the drafter has none of its own, and no cache that could lag behind
    """

    def __init__(self, target: CachedLM, eos_token_ids: Sequence[int]):
        super().__init__(target, eos_token_ids)
        self.index = NgramIndex(int(target.model.config.vocab_size))

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        if "score" in features:
            raise InputError(
                "the policy reads the score of an acceptance predictor, and prompt lookup has no states that one could "
                "read; choose another policy"
            )

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        self.index = NgramIndex(self.index.vocabulary)
        self.index.extend(context)

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        """Draft 0 to `context.limit` tokens after `tokens`, which go on where those of the last call ended."""
        draft, index = Draft(), self.index
        start = time.perf_counter()
        index.extend(tokens[len(index.text) :])
        if not index.matched:
            return draft
        while True:
            depth = len(draft.tokens) + 1
            token, step = index.token(depth), index.step(depth)
            if context.sampler.mode == "rejection":
                draft.probs.append(self._certain(token))
            draft.parents.append(depth - 2)
            draft.tokens.append(token)
            draft.steps.append(step)
            drafted = time.perf_counter()
            draft.step_s.append(drafted - start)
            if depth == context.limit or token in self.eos_token_ids:
                return draft
            proceed = keep(step, depth)
            start = time.perf_counter()
            draft.asked += 1
            draft.policy_s += start - drafted
            if not proceed:
                return draft

    def _certain(self, token: int) -> torch.Tensor:
        """The distribution [V] of this token alone."""
        probs = torch.zeros(self.index.vocabulary, device=self.lm.device)
        probs[token] = 1.0
        return probs

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        """There is no cache to mend."""

    def prepare_tree(self, policy: TreePolicy, length: int) -> None:
        raise InputError(f"policy {policy.name} drafts trees, prompt lookup chains only; choose another policy")


def lookup_columns(
    vocabulary: int,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What is proposed at every position, a `Recorder` once the vocabulary's size is given.

    Where nothing is, draft_token holds NO_TOKEN. There are no ranks of true tokens, since lookup orders none.
    """
    assert tree is None, "prompt lookup drafts chains"
    total = len(output)
    columns: Columns = {name: np.zeros((total, depth), dtype) for name, dtype in STEP_LISTS.items()}
    columns["draft_token"][:] = NO_TOKEN
    match_len = np.zeros(total, np.uint8)
    index = NgramIndex(vocabulary)
    index.extend(prompt)
    for t, token in enumerate(output):
        if index.matched:
            drafted = [index.token(i) for i in range(1, depth + 1)]
            steps = [index.step(i) for i in range(1, depth + 1)]
            columns["draft_token"][t] = drafted
            for name in ("prob", "confidence", "entropy_nats"):
                columns[name][t] = [getattr(step, name) for step in steps]
            correct = [a == b for a, b in zip(drafted, output[t : t + depth], strict=False)]
            match_len[t] = correct.index(False) if False in correct else len(correct)
        index.extend([token])
    return {"token": np.asarray(output, dtype=np.int32), "match_len": match_len, **columns}


@dataclass(frozen=True, eq=False)
class LookupKind(DrafterKind):
    """Any target has it."""

    name: ClassVar[str] = "lookup"
    origin: ClassVar[Origin] = "target"
    trees: ClassVar[bool] = False
    has_states: ClassVar[bool] = False

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
            raise InputError("prompt lookup is recorded in greedy and Gumbel mode only; choose one of them")
        return partial(lookup_columns, int(target.config.vocab_size))

    @property
    def facts(self) -> dict[str, Any]:
        return {"longest_ngram": MAX_NGRAM}

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (target,)

    def profiling_text(self, tokens: list[int]) -> list[int]:
        """It drafts only what the text repeats."""
        return tokens[:1] * len(tokens)
