"""Lookup drafters against their rules written out plainly, against Arctic Inference, and replayed round for round."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost
from specsim.engines.as_engine import as_engine
from specsim.engines.conventions import CONVENTIONS, Conventions
from specsim.engines.definitions import engine_counts
from specsim.io.errors import InputError
from specsim.lookup.from_text import TokenText, suffix_trace
from specsim.lookup.ngram import RULES, NgramIndex, NgramRule, lookup_columns
from specsim.lookup.suffix import SuffixDecoder, SuffixDraft, SuffixRule, SuffixText, SuffixTree
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import foretold
from specsim.trace.trace import NO_TOKEN
from tests.specsim.engines.test_as_engine import replayed_rounds
from tests.support.checks import refusal

VOCAB = 97
texts = st.lists(st.integers(0, 3), max_size=40)
ngram_rules = st.builds(
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


def ngram_draft(text: list[int], depth: int, rule: NgramRule) -> list[int]:
    """The draft, by brute force."""
    n, start = matched(text, rule)
    if rule.at_end == "stop":
        return text[start : start + depth] if n else []
    drafted: list[int] = []
    while n and len(drafted) < depth:
        drafted.append((text + drafted)[start + len(drafted)])
    return drafted


@given(texts, st.integers(1, 12), ngram_rules)
def test_the_index_finds_what_a_search_finds(text: list[int], depth: int, rule: NgramRule) -> None:
    index = NgramIndex(VOCAB, rule)
    index.extend(text)
    length, start = matched(text, rule)
    assert index.matched == length and (not length or index.start == start)
    drafted = ngram_draft(text, depth, rule)
    assert [index.token(i) for i in range(1, int(min(depth, index.reach)) + 1)] == drafted


@given(texts, st.integers(1, 5), ngram_rules)
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


@given(texts, texts, st.integers(1, 6), ngram_rules)
def test_columns_hold_the_draft_at_every_position(
    prompt: list[int], output: list[int], depth: int, rule: NgramRule
) -> None:
    columns = lookup_columns(rule, VOCAB, prompt, output, depth)
    for t in range(len(output)):
        drafted = ngram_draft(prompt + output[:t], depth, rule)
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
    refusal(lambda: NgramRule(low, high), "n-grams of ", " give 1 <= shortest <= longest <= 64")


Word = tuple[int, ...]


class Counts:
    """How often each substring of some texts occurs, and what follows it: most frequent first, equals as they came."""

    def __init__(self, depth: int):
        self.depth = depth
        self.count: Counter[Word] = Counter()
        self.following: defaultdict[Word, list[int]] = defaultdict(list)

    def append(self, text: list[int], token: int) -> None:
        text.append(token)
        for n in range(1, min(self.depth, len(text)) + 1):
            self._change(tuple(text[-n:]), 1)

    def remove(self, text: Sequence[int]) -> None:
        for start in range(len(text)):
            for end in range(start + 1, min(start + self.depth, len(text)) + 1):
                self._change(tuple(text[start:end]), -1)

    def _change(self, word: Word, by: int) -> None:
        """Move the last token among those that follow the others.

        Of equals, the first becomes the first of those that are more frequent by 1, another the last; of those that are
        less frequent by 1 it becomes the first.
        """
        before, token, times = word[:-1], word[-1], self.count[word]
        siblings = self.following[before]
        first = next((sibling for sibling in siblings if self.count[(*before, sibling)] == times), None) == token
        if times:
            siblings.remove(token)
        self.count[word] += by
        if self.count[word]:
            ahead = times if by < 0 else times + 1 + (first and times > 0)
            place = sum(self.count[(*before, sibling)] >= ahead for sibling in siblings)
            siblings.insert(place, token)

    def draft(self, ending: Sequence[int], max_tokens: int, rule: SuffixRule) -> SuffixDraft:
        best = SuffixDraft([], [], np.float32(0))
        for n in range(1, len(ending)):
            word: Word = tuple(ending[-n:])
            if not self.count[word]:
                break
            longest = min(
                max_tokens, int(np.float32(n) * np.float32(rule.max_spec_factor) + rule.max_spec_offset + 1e-6)
            )
            tokens: list[int] = []
            shares: list[float] = []
            prob, score = np.float32(1), np.float32(0)
            while len(tokens) < longest and self.following[word]:
                token = self.following[word][0]
                share = np.float32(self.count[(*word, token)]) / np.float32(self.count[word])
                prob, word = prob * share, (*word, token)
                if prob < np.float32(rule.min_token_prob):
                    break
                tokens, shares, score = [*tokens, token], [*shares, float(share)], score + prob
            if score >= best.score:
                best = SuffixDraft(tokens, shares, score)
        return best


class Plain:
    """The decoder, from such counts."""

    def __init__(self, rule: SuffixRule):
        self.rule, self.outputs, self.cached = rule, Counts(rule.max_tree_depth), list[list[int]]()

    def begin(self, prompt: Sequence[int]) -> None:
        self.own, self.text = Counts(self.rule.max_tree_depth), list[int]()
        for token in prompt:
            self.own.append(self.text, token)
        self.cached.append([])
        if len(self.cached) > self.rule.max_cached_requests:
            self.outputs.remove(self.cached.pop(0))

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.own.append(self.text, token)
            if self.cached:
                self.outputs.append(self.cached[-1], token)

    def propose(self, max_tokens: int) -> SuffixDraft:
        ending = self.text[-self.rule.max_tree_depth :]
        own, other = self.own.draft(ending, max_tokens, self.rule), self.outputs.draft(ending, max_tokens, self.rule)
        return own if own.score >= other.score else other


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=20)
requests = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4)
suffix_rules = st.builds(
    SuffixRule,
    max_tree_depth=st.integers(1, 12),
    max_spec_factor=st.sampled_from([0.5, 1.0, 2.5]),
    max_spec_offset=st.sampled_from([-1.0, 0.0, 2.0]),
    min_token_prob=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    max_cached_requests=st.sampled_from([0, 1, 2, 10]),
)


@given(requests, suffix_rules, st.integers(1, 8))
def test_it_proposes_what_the_rule_written_out_proposes(
    requests: list[tuple[list[int], list[int]]], rule: SuffixRule, max_tokens: int
) -> None:
    decoder, plain = SuffixDecoder(rule), Plain(rule)
    for prompt, output in requests:
        decoder.begin(prompt)
        plain.begin(prompt)
        for token in output:
            assert decoder.propose(max_tokens) == plain.propose(max_tokens)
            decoder.extend([token])
            plain.extend([token])


def test_by_hand() -> None:
    """a b c a b d a b: c and d followed "a b" once each, and it ends the text; c came first."""
    a, b, c, d, other = range(5)
    tree, text = SuffixTree(4), SuffixText()
    tree.extend(text, [a, b, c, a, b, d, a, b])
    rule = SuffixRule(min_token_prob=0.3)
    # By "b" a single token, by "a b" two: P(c) = 1/3, and after it came a alone, which adds 1/3.
    draft = tree.propose([d, a, b], 8, rule)
    assert draft.tokens == [c, a]
    assert draft.shares == [float(np.float32(1) / np.float32(3)), 1.0]
    assert draft.score == pytest.approx(2 / 3)
    assert tree.propose([d, a, b], 8, SuffixRule(min_token_prob=0.4)).tokens == []
    # A second d makes it more frequent: 2 of 4.
    tree.extend(text, [d, a, b])
    assert tree.propose([other, a, b], 1, rule) == SuffixDraft([d], [0.5], np.float32(0.5))


def test_of_equally_frequent_tokens_the_order_is_the_engines() -> None:
    """After 0 came 1, 2, 3. The second 2 goes ahead; 3, not first of the rest, comes behind it, but 1 before them."""

    def best(*following: int) -> int:
        tree, text = SuffixTree(3), SuffixText()
        tree.extend(text, [token for follower in (*following, 9) for token in (0, follower)])
        return tree.propose([9, 0], 1, SuffixRule(min_token_prob=0)).tokens[0]

    assert best(1, 2, 3) == 1
    assert best(1, 2, 3, 2) == 2
    assert best(1, 2, 3, 2, 3) == 2
    assert best(1, 2, 3, 2, 1) == 1


def texts_of(seed: int, count: int = 8) -> list[TokenText]:
    """Outputs made of phrases that come again."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 12, rng.integers(2, 9)).tolist() for _ in range(6)]

    def words(max_tokens: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            tokens += phrases[rng.integers(6)] if rng.random() < 0.8 else [int(rng.integers(0, 12))]
        return tokens[:max_tokens]

    return [TokenText(words(15), words(40 + s), "all", 40 + s) for s in range(count)]


def run_out(
    texts: Sequence[TokenText], rule: SuffixRule, max_tokens: int, k: int, conventions: Conventions
) -> list[list[tuple[int, int, int]]]:
    """(t, drafted, accepted) of an engine that drafts by the rule, request after request, and cuts drafts at k."""
    decoder, by_request = Plain(rule), []
    for text in texts:
        decoder.begin(text.prompt)
        t = int(conventions.first_token == "prefill")
        decoder.extend(text.output[:t])
        rounds = []
        while t < len(text.output):
            draft = decoder.propose(max_tokens).tokens[:k]
            if conventions.last_draft != "K":
                draft = draft[: len(text.output) - t - 1]
            agreed = [a == b for a, b in zip(draft, text.output[t:], strict=False)]
            accepted = agreed.index(False) if False in agreed else len(agreed)
            if draft or conventions.counts_empty:
                rounds.append((t, len(draft), accepted))
            decoder.extend(text.output[t : t + accepted + 1])
            t += accepted + 1
        by_request.append(rounds)
    return by_request


@pytest.mark.parametrize("engine", ["specsim", "vllm"])
@pytest.mark.parametrize(("max_tokens", "k"), [(3, 3), (8, 8), (24, 24), (8, 3)])
@pytest.mark.parametrize("cached", [0, 3, 10000])
def test_a_replay_is_the_engines_run_round_for_round(engine: str, max_tokens: int, k: int, cached: int) -> None:
    texts, rule = texts_of(max_tokens), SuffixRule(max_cached_requests=cached)
    trace, conventions = suffix_trace(texts, rule, max_tokens), CONVENTIONS[engine]
    expected = run_out(texts, rule, max_tokens, k, conventions)
    assert replayed_rounds(trace, FixedK(k), 100, conventions) == expected
    assert sum(accepted for rounds in expected for _, _, accepted in rounds) > 50


def test_a_limit_on_drafts_is_another_drafter() -> None:
    """The sum of probabilities up to the limit decides: what wins at 1 token need not win at 3."""
    texts, rule = texts_of(0), SuffixRule()
    cut, chosen = suffix_trace(texts, rule, 8).shallower(2), suffix_trace(texts, rule, 2)
    assert (cut.draft_token != chosen.draft_token).any()
    assert run_out(texts, rule, 8, 2, CONVENTIONS["specsim"]) != run_out(texts, rule, 2, 2, CONVENTIONS["specsim"])
    played = PricedTrace(as_engine(suffix_trace(texts, rule, 8), CONVENTIONS["vllm"]).trace, ConstantCost(1e-6, 0.01))
    with pytest.raises(InputError, match=r"shortens drafts of up to .*`specsim record-text --max-draft-tokens 2`"):
        engine_counts(played, FixedK(2), CONVENTIONS["vllm"])
    assert engine_counts(played, FixedK(8), CONVENTIONS["vllm"]).num_drafts > 0


def test_outputs_before_are_counted_whole() -> None:
    texts = texts_of(0)
    with pytest.raises(InputError, match="drafts from earlier outputs that are longer"):
        as_engine(suffix_trace(texts, SuffixRule(), 8), CONVENTIONS["vllm"], max_output_tokens=20)
    alone = suffix_trace(texts, SuffixRule(max_cached_requests=1), 8)
    assert as_engine(alone, CONVENTIONS["vllm"], max_output_tokens=20).cut_off == 0


def test_a_trace_says_what_the_engine_says_of_its_drafts() -> None:
    """Its probabilities are products of the shares, the score their sum."""
    texts, rule = texts_of(1), SuffixRule()
    trace, decoder, row = suffix_trace(texts, rule, 12), SuffixDecoder(rule), 0
    before = foretold(trace)
    assert trace.meta["drafter_facts"] == {**dataclasses.asdict(rule), "max_spec_tokens": 12}
    for text in texts:
        decoder.begin(text.prompt)
        for token in text.output:
            draft = decoder.propose(12)
            drafted = trace.draft_token[row] != NO_TOKEN
            assert trace.draft_token[row][drafted].tolist() == draft.tokens
            probs = np.cumprod(trace.confidence[row][drafted], dtype=np.float32)
            assert np.float32(sum(probs, np.float32(0))) == draft.score
            assert before[row] == (draft.shares[0] if draft.tokens else 0.0)
            decoder.extend([token])
            row += 1
    sure = trace.confidence == 1
    assert sure.any() and (trace.entropy_nats[sure] == 0).all() and np.isfinite(trace.entropy_nats).all()


def test_it_keeps_no_more_than_what_comes_again() -> None:
    """Nodes are made for substrings that came twice, and a node for each end of what came once."""

    def nodes(tree: SuffixTree) -> int:
        pending, count = [tree.root], 0
        while pending:
            node = pending.pop()
            pending += node.by_token.values() if node.text is None else []
            count += 1
        return count

    tree, text = SuffixTree(24), SuffixText()
    tree.extend(text, range(500))
    assert nodes(tree) == 501
    tree.remove(text)
    assert nodes(tree) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_tree_depth", 0), ("max_spec_factor", -1.0), ("max_spec_offset", float("nan")), ("min_token_prob", 1.5),
     ("max_cached_requests", -1)],
)  # fmt: skip
def test_settings_that_are_none_are_refused(setting: str, value: float) -> None:
    changed: dict[str, Any] = {setting: value}
    refusal(lambda: SuffixRule(**changed), match=f"{setting}={value}; give ")


def arctic_rule(rng: np.random.Generator) -> SuffixRule:
    return SuffixRule(
        max_tree_depth=int(rng.choice([2, 5, 24, 64])),
        max_spec_factor=float(rng.choice([0.3, 1.0, 1.7, 4.0])),
        max_spec_offset=float(rng.choice([-1.0, 0.0, 2.5])),
        min_token_prob=float(rng.choice([0.0, 0.1, 0.3])),
        max_cached_requests=int(rng.choice([0, 1, 3, 10000])),
    )


@pytest.mark.slow
def test_every_draft_is_arctic_inferences() -> None:
    """Token for token, with its probabilities and its score, where the package is installed."""
    suffix_decoding = pytest.importorskip("arctic_inference.suffix_decoding")
    drafted = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        rule, max_tokens = arctic_rule(rng), int(rng.choice([1, 3, 8, 64]))
        ours = SuffixDecoder(rule)
        theirs = suffix_decoding.SuffixDecodingCache(rule.max_tree_depth, rule.max_cached_requests)
        for request, text in enumerate(texts_of(seed, count=40)):
            ours.begin(text.prompt)
            theirs.start_request(request, text.prompt)
            for t, token in enumerate(text.output):
                draft = ours.propose(max_tokens)
                other = theirs.speculate(
                    request,
                    [*text.prompt, *text.output[:t]],
                    max_spec_tokens=max_tokens,
                    max_spec_factor=rule.max_spec_factor,
                    max_spec_offset=rule.max_spec_offset,
                    min_token_prob=rule.min_token_prob,
                )
                assert draft.tokens == other.token_ids
                assert np.cumprod(np.array(draft.shares, np.float32), dtype=np.float32).tolist() == other.probs
                assert float(draft.score) == other.score
                drafted += len(draft.tokens)
                ours.extend([token])
                theirs.add_active_response(request, [token])
            theirs.stop_request(request)
    assert drafted > 100_000
