"""Prompt lookup by any rule, against a search written out, and against the rounds that vLLM counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.io.errors import InputError
from specsim.lookup.ngram import RULES, NgramIndex, NgramRule, lookup_columns
from specsim.trace.trace import NO_TOKEN

VOCAB = 97
texts = st.lists(st.integers(0, 3), max_size=40)
rules = st.builds(
    lambda low, more, occurrence, at_end: NgramRule(low, low + more, occurrence, at_end),
    st.integers(1, 3), st.integers(0, 3), st.sampled_from(["first", "last"]), st.sampled_from(["stop", "copy"]),
)  # fmt: skip


def matched(text: list[int], rule: NgramRule) -> tuple[int, int]:
    """By brute force: the longest n-gram at the end that occurs before, and the place after the occurrence."""
    for n in range(rule.max_ngram, rule.min_ngram - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if ends:
            return n, ends[0 if rule.occurrence == "first" else -1]
    return 0, 0


def foretold(text: list[int], depth: int, rule: NgramRule) -> list[int]:
    """The draft, by brute force."""
    n, start = matched(text, rule)
    if rule.at_end == "stop":
        return text[start : start + depth] if n else []
    drafted: list[int] = []
    while n and len(drafted) < depth:
        drafted.append((text + drafted)[start + len(drafted)])
    return drafted


@given(texts, st.integers(1, 12), rules)
def test_the_index_finds_what_a_search_finds(text: list[int], depth: int, rule: NgramRule) -> None:
    index = NgramIndex(VOCAB, rule)
    index.extend(text)
    length, start = matched(text, rule)
    assert index.matched == length and (not length or index.start == start)
    drafted = foretold(text, depth, rule)
    assert [index.token(i) for i in range(1, int(min(depth, index.reach)) + 1)] == drafted


@given(texts, st.integers(1, 5), rules)
def test_its_confidence_is_how_often_matches_of_this_length_came_true(
    text: list[int], depth: int, rule: NgramRule
) -> None:
    index = NgramIndex(VOCAB, rule)
    index.extend(text)
    length = min(index.matched + depth - 1, rule.max_ngram)
    before = [(matched(text[:t], rule), text[t]) for t in range(len(text))]
    outcomes = [text[start] == came for (n, start), came in before if n == length and n]
    prob = (sum(outcomes) + 1) / (len(outcomes) + 2) if length else 0.5
    assert index.prob(depth) == prob
    spread = [prob] + [(1 - prob) / (VOCAB - 1)] * (VOCAB - 1)
    assert index.entropy_nats(prob) == pytest.approx(-sum(p * math.log(p) for p in spread), rel=1e-6)


@given(texts, texts, st.integers(1, 6), rules)
def test_columns_hold_the_draft_at_every_position(
    prompt: list[int], output: list[int], depth: int, rule: NgramRule
) -> None:
    columns = lookup_columns(rule, VOCAB, prompt, output, depth)
    for t in range(len(output)):
        drafted = foretold(prompt + output[:t], depth, rule)
        assert columns["draft_token"][t].tolist() == drafted + [NO_TOKEN] * (depth - len(drafted))
        agreed = np.cumprod([a == b for a, b in zip(drafted, output[t:], strict=False)]).sum()
        assert columns["match_len"][t] == agreed
        assert ((columns["prob"][t] > 0) == (columns["draft_token"][t] != NO_TOKEN)).all()


def test_it_is_quick_however_long_the_text() -> None:
    """Its work per token does not grow with the text: the index keeps places, it does not search."""
    index = NgramIndex(VOCAB, RULES["specsim"])
    index.extend([*range(50)] * 400)
    assert len(index._after) <= 50 * RULES["specsim"].max_ngram


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3), (1, 65)])
def test_lengths_that_are_none_are_refused(low: int, high: int) -> None:
    with pytest.raises(InputError, match="n-grams of .* give 1 <= shortest <= longest <= 64"):
        NgramRule(low, high)
