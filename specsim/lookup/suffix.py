"""Suffix decoding (Oliaro et al. 2024) as Arctic Inference has it: draft what most often followed the text's ending.

Two trees count substrings: the first those of the prompt and the output so far, the second those of this and earlier
outputs. For every ending of the text that a tree holds, the most frequent next tokens make a draft; longer endings make
longer drafts. The draft whose estimated probabilities have the largest sum is proposed. Everything depends on the texts
alone.

The rule is that of arctic-inference 0.3.0, which vLLM calls, including single precision and the choice among equally
frequent tokens. The tree differs from the engine's: a node stands for a single token, which is simpler and needs more
memory; where a substring occurs once, the text itself stands for all that follows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.lookup.ngram import proposal_columns
from specsim.trace.trace import MAX_DEPTH

ONE = np.float32(1)


@dataclass(frozen=True)
class SuffixRule:
    """How long a substring is counted, and how far it is continued; named as in the engine, with vLLM's defaults.

    max_tree_depth : longest substring that is counted, in tokens
    max_spec_factor, max_spec_offset : a match of n tokens is continued by max_spec_factor * n + max_spec_offset tokens
        at most
    min_token_prob : a draft goes on while it is at least so probable
    max_cached_requests : requests whose outputs are counted together, including the current request; the oldest is
        dropped. 0: none

    Raises InputError for values that the engine refuses or ignores.

    References: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975.

    >>> from specsim.lookup.suffix import SuffixRule
    >>> SuffixRule(max_tree_depth=64).min_token_prob
    0.1
    """

    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    max_cached_requests: int = 10000

    def __post_init__(self) -> None:
        allowed = {
            "max_tree_depth": (1, MAX_DEPTH),
            "max_spec_factor": (0, MAX_DEPTH),
            "max_spec_offset": (-MAX_DEPTH, MAX_DEPTH),
            "min_token_prob": (0, 1),
            "max_cached_requests": (0, 2**31 - 1),
        }
        for name, (low, high) in allowed.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name}={getattr(self, name)}; give {low} to {high}")


class _Node:
    """A substring, by its last token and its parent.

    count : how often it occurs
    text, after : where it was found, if it occurred once so far: the text, and the place behind it. What follows
        there are its descendants, of which no nodes are made
    children, by_token : else the substrings that are a token longer, most frequent first, see `_rise`
    """

    __slots__ = ("after", "by_token", "children", "count", "depth", "text", "token")
    children: list[_Node]
    by_token: dict[int, _Node]
    text: list[int] | None

    def __init__(self, token: int, depth: int, text: list[int], after: int):
        self.token, self.depth, self.text, self.after = token, depth, text, after
        self.count = 1

    def open(self, max_depth: int) -> None:
        """Make a child of what follows the place, so that there can be others."""
        text, self.text = self.text, None
        self.children, self.by_token = [], {}
        if text is not None and self.after < len(text) and self.depth < max_depth:
            self.add(_Node(text[self.after], self.depth + 1, text, self.after + 1))

    def add(self, child: _Node) -> None:
        self.children.append(child)
        self.by_token[child.token] = child


def _negative_count(node: _Node) -> int:
    return -node.count


def _rise(siblings: list[_Node], node: _Node) -> None:
    """Increment a node's count and move it up among its siblings, which are in order of their counts.

    Among equals the engine's order depends on how they came: the first of its equals becomes the first of those
    that occur once more, any other the last of them.
    """
    first = bisect_left(siblings, -node.count, key=_negative_count)
    place = siblings.index(node, first)
    goal = bisect_left(siblings, -node.count - 1, key=_negative_count) if place == first else first
    siblings.insert(goal, siblings.pop(place))
    node.count += 1


def _sink(siblings: list[_Node], node: _Node) -> None:
    """Decrement a node's count: it becomes the first of its new equals."""
    last = bisect_right(siblings, -node.count, key=_negative_count) - 1
    siblings.insert(last, siblings.pop(siblings.index(node, 0, last + 1)))
    node.count -= 1


class SuffixText:
    """A growing text of a tree, and the nodes of its last suffixes, the longest first.

    Where such a node occurs once, it stands for all of its suffix.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.nodes: deque[_Node] = deque()


class SuffixDraft(NamedTuple):
    """Proposed tokens, each with its share of what followed the substring before it, and the sum of probabilities."""

    tokens: list[int]
    shares: list[float]
    score: np.float32


NOTHING = SuffixDraft([], [], np.float32(0))


class SuffixTree:
    """How often each substring of up to max_depth tokens occurs in some texts."""

    def __init__(self, max_depth: int):
        self.max_depth = max_depth
        self.root = _Node(-1, 0, [], 0)  # its children have no order: nothing continues an empty match
        self.root.open(max_depth)

    def extend(self, text: SuffixText, tokens: Iterable[int]) -> None:
        """Append tokens to a text."""
        for token in tokens:
            text.tokens.append(token)
            text.nodes.append(self.root)
            if len(text.nodes) > self.max_depth:
                text.nodes.popleft()
            self._step(text, token)

    def _step(self, text: SuffixText, token: int) -> None:
        end = len(text.tokens)
        for i, node in enumerate(text.nodes):
            depth = len(text.nodes) - 1 - i
            while node.text is None and node.depth < depth:  # other suffixes made nodes on this path
                node = node.by_token[text.tokens[end - 1 - depth + node.depth]]
            if node.text is None:
                child = node.by_token.get(token)
                if child is None:
                    child = _Node(token, depth + 1, text.tokens, end)
                    node.add(child)
                else:
                    self._count_again(node, child)
                node = child
            text.nodes[i] = node

    def _count_again(self, parent: _Node, child: _Node) -> None:
        if child.text is not None:
            child.open(self.max_depth)
        if parent is self.root:
            child.count += 1
        else:
            _rise(parent.children, child)

    def remove(self, text: SuffixText) -> None:
        """Remove the substrings of a text from the counts."""
        for start in range(len(text.tokens)):
            node = self.root
            for token in text.tokens[start : start + self.max_depth]:
                child = node.by_token[token]
                if child.count == 1:
                    del node.by_token[token]
                    node.children.remove(child)
                    break
                if node is self.root:
                    child.count -= 1
                else:
                    _sink(node.children, child)
                node = child

    def propose(self, ending: Sequence[int], max_tokens: int, rule: SuffixRule) -> SuffixDraft:
        """Return the best draft of up to max_tokens after this ending of a text."""
        best, min_prob = NOTHING, np.float32(rule.min_token_prob)
        factor, offset = np.float32(rule.max_spec_factor), np.float32(rule.max_spec_offset)
        for length in range(1, len(ending)):
            place = self._find(ending[len(ending) - length :])
            if place is None:  # neither does a longer match go on
                break
            limit = min(max_tokens, int(float(np.float32(length) * factor + offset) + 1e-6))
            draft = _draft(self._follow(*place), limit, min_prob)
            if draft.score >= best.score:
                best = draft
        return best

    def _find(self, match: Sequence[int]) -> tuple[_Node, int] | None:
        """Find the deepest node of a substring, and how many more tokens it has; None if nothing follows it."""
        node = self.root
        for i, token in enumerate(match):
            if node.text is not None:
                beyond = len(match) - i
                matches = node.text[node.after : node.after + beyond] == match[i:]
                return (node, beyond) if matches and node.after + beyond < len(node.text) else None
            if token not in node.by_token:
                return None
            node = node.by_token[token]
        follows = node.children if node.text is None else node.after < len(node.text)
        return (node, 0) if follows else None

    def _follow(self, node: _Node, beyond: int) -> Iterator[tuple[int, np.float32]]:
        """Iterate over the most frequent next tokens, each with its share."""
        while node.text is None:
            if not node.children:
                return
            child = node.children[0]
            yield child.token, np.float32(child.count) / np.float32(node.count)
            node = child
        for token in node.text[node.after + beyond : node.after + self.max_depth - node.depth]:
            yield token, ONE


def _draft(following: Iterable[tuple[int, np.float32]], limit: int, min_prob: np.float32) -> SuffixDraft:
    """Take up to `limit` of these tokens while their joint probability is at least min_prob."""
    tokens: list[int] = []
    shares: list[float] = []
    prob, score = ONE, np.float32(0)
    for token, share in following:
        prob = prob * share
        if len(tokens) >= limit or prob < min_prob:
            break
        tokens.append(token)
        shares.append(float(share))
        score = score + prob
    return SuffixDraft(tokens, shares, score)


class SuffixDecoder:
    """Suffix decoding of requests in sequence."""

    def __init__(self, rule: SuffixRule):
        self.rule = rule
        self.outputs = SuffixTree(rule.max_tree_depth)
        self.cached: deque[SuffixText] = deque()

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request."""
        self.own, self.text = SuffixTree(self.rule.max_tree_depth), SuffixText()
        self.own.extend(self.text, prompt)
        if self.rule.max_cached_requests > 0:
            if len(self.cached) == self.rule.max_cached_requests:
                self.outputs.remove(self.cached.popleft())
            self.cached.append(SuffixText())

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with tokens of its output."""
        self.own.extend(self.text, tokens)
        if self.rule.max_cached_requests > 0:
            self.outputs.extend(self.cached[-1], tokens)

    def propose(self, max_tokens: int) -> SuffixDraft:
        """Return the draft of the tree with the larger score."""
        ending = self.text.tokens[-self.rule.max_tree_depth :]
        own, other = (tree.propose(ending, max_tokens, self.rule) for tree in (self.own, self.outputs))
        return own if own.score >= other.score else other


def suffix_columns(
    decoder: SuffixDecoder, vocabulary: int, prompt: Sequence[int], output: Sequence[int], depth: int
) -> dict[str, Array]:
    """Build the columns of a trace of this request, and add it to the decoder."""

    def proposals() -> Iterator[tuple[list[int], list[float]]]:
        for token in output:
            draft = decoder.propose(depth)
            yield draft.tokens, draft.shares
            decoder.extend([token])

    decoder.begin(prompt)
    return proposal_columns(output, proposals(), depth, vocabulary)
