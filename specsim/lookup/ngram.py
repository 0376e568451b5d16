"""Prompt lookup (Saxena 2023): draft what followed the text's last n tokens where they stood before, without a model.

The text is the prompt and the output so far. Of the n-grams at its end the longest that occurred before counts; of its
occurrences, by rule, the first or the last; and where what followed reaches the text's end, the draft stops, or goes on
with the drafted tokens themselves, as LZ77 copies. Everything depends on the text alone, so the same text replays under
any rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.trace.trace import NO_TOKEN, STEP_LISTS

MAX_RULE_NGRAM = 64  # tokens


@dataclass(frozen=True)
class NgramRule:
    """Which n-grams are looked up, and what is copied.

    min_ngram, max_ngram : tokens of the shortest and of the longest n-gram that is looked up
    occurrence : which of several occurrences is copied
    at_end : whether a draft ends with the text, or goes on with its own tokens

    Raises InputError for lengths that are not 1 <= min_ngram <= max_ngram <= 64.

    >>> from specsim.lookup.ngram import RULES
    >>> RULES["vllm"].occurrence, RULES["vllm"].at_end
    ('first', 'stop')
    """

    min_ngram: int = 1
    max_ngram: int = 3
    occurrence: Literal["first", "last"] = "last"
    at_end: Literal["stop", "copy"] = "copy"

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram <= MAX_RULE_NGRAM:
            raise InputError(
                f"n-grams of {self.min_ngram} to {self.max_ngram} tokens; give 1 <= shortest <= longest "
                f"<= {MAX_RULE_NGRAM}"
            )


# As their sources have them: vLLM 0.32 (prompt_lookup_min and _max where neither is given), transformers 5.17.
RULES = {
    "specsim": NgramRule(),
    "vllm": NgramRule(5, 5, "first", "stop"),
    "transformers": NgramRule(1, 2, "first", "stop"),
}


class NgramIndex:
    """A growing text, with the place after an occurrence of each of its n-grams.

    A token more takes a few microseconds, however long the text is.

    matched : length of the longest n-gram at the text's end that occurred before, 0 if none did
    start : place of the token that followed it then
    hits, trials : [max_ngram + 1], by matched length: places of the text at which there was a match,
        and those whose next token was the predicted token
    """

    def __init__(self, vocabulary: int, rule: NgramRule):
        self.vocabulary, self.rule = vocabulary, rule
        self.text: list[int] = []
        self.matched = self.start = 0
        self.hits, self.trials = [0] * (rule.max_ngram + 1), [0] * (rule.max_ngram + 1)
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, after, rule = self.text, self._after, self.rule
        for token in tokens:
            if self.matched:
                self.trials[self.matched] += 1
                self.hits[self.matched] += text[self.start] == token
            text.append(token)
            end = len(text)
            self.matched = 0
            for n in range(rule.min_ngram, min(rule.max_ngram, end) + 1):
                ngram = tuple(text[end - n :])
                if ngram in after:
                    self.matched, self.start = n, after[ngram]
                    if rule.occurrence == "first":
                        continue
                after[ngram] = end

    @property
    def reach(self) -> float:
        """Most tokens that the match predicts."""
        if not self.matched:
            return 0
        return math.inf if self.rule.at_end == "copy" else len(self.text) - self.start

    def token(self, depth: int) -> int:
        """Return the depth-th token, from 1, that the match predicts."""
        return self.text[self.start + (depth - 1) % (len(self.text) - self.start)]

    def prob(self, depth: int) -> float:
        """Estimate the probability of the depth-th token, if the tokens before it are right.

        The share of this text's matches of that length whose next token came, by Laplace's rule, (hits + 1) /
        (trials + 2).
        """
        length = min(self.matched + depth - 1, self.rule.max_ngram)
        return (self.hits[length] + 1) / (self.trials[length] + 2)

    def entropy_nats(self, prob: float) -> float:
        """Compute the entropy of a proposal of this probability."""
        return entropy_nats(prob, self.vocabulary)


def entropy_nats(prob: float, vocabulary: int) -> float:
    """Compute the entropy of a distribution with this probability of a token and the rest uniform."""
    if prob == 1:
        return 0.0
    rest = (1 - prob) / (vocabulary - 1)
    return -prob * math.log(prob) - (1 - prob) * math.log(rest)


def proposal_columns(
    output: Sequence[int],
    proposals: Iterable[tuple[Sequence[int], Sequence[float]]],
    depth: int,
    vocabulary: int,
) -> dict[str, Array]:
    """Build the columns of a trace of a drafter that reads only the text.

    Where nothing is proposed, draft_token holds `NO_TOKEN`. There are no ranks of true tokens, since none are ordered.

    proposals : at every position of the output tokens, up to `depth` of them, each with its probability if those
        before it are right
    """
    total = len(output)
    columns: dict[str, Array] = {name: np.zeros((total, depth), dtype) for name, dtype in STEP_LISTS.items()}
    columns["draft_token"][:] = NO_TOKEN
    match_len = np.zeros(total, np.uint8)
    for t, (drafted, probs) in enumerate(proposals):
        proposed = len(drafted)
        columns["draft_token"][t, :proposed] = drafted
        columns["prob"][t, :proposed] = columns["confidence"][t, :proposed] = probs
        columns["entropy_nats"][t, :proposed] = [entropy_nats(prob, vocabulary) for prob in probs]
        correct = [a == b for a, b in zip(drafted, output[t : t + proposed], strict=False)]
        match_len[t] = correct.index(False) if False in correct else len(correct)
    return {"token": np.asarray(output, dtype=np.int32), "match_len": match_len, **columns}


def lookup_columns(
    rule: NgramRule, vocabulary: int, prompt: Sequence[int], output: Sequence[int], depth: int
) -> dict[str, Array]:
    """Build the columns of a trace of this text: the proposals at every output position."""

    def proposals() -> Iterator[tuple[list[int], list[float]]]:
        for token in output:
            depths = range(1, int(min(depth, index.reach)) + 1)
            yield [index.token(i) for i in depths], [index.prob(i) for i in depths]
            index.extend([token])

    index = NgramIndex(vocabulary, rule)
    index.extend(prompt)
    return proposal_columns(output, proposals(), depth, vocabulary)
