"""Dense traces from texts alone: proposals of prompt lookup and suffix decoding in any model's or engine's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import bounded_lines, parse_json
from specsim.io.progress import Counter, no_progress
from specsim.lookup.ngram import NgramRule, lookup_columns
from specsim.lookup.suffix import SuffixDecoder, SuffixRule, suffix_columns
from specsim.trace.joined import LOOKUP, SUFFIX
from specsim.trace.trace import MAX_DEPTH, Trace

MAX_TOKEN = 2**31 - 1
WRITE = 'write {"prompt_tokens": [1, 2], "output_tokens": [3, 4]} in every line'


class TokenText(NamedTuple):
    """A prompt, its output, and the limit on output tokens."""

    prompt: list[int]
    output: list[int]
    domain: str
    max_output_tokens: int


class _Row(TypedDict):
    prompt_tokens: list[int]
    output_tokens: list[int]
    domain: NotRequired[str]
    max_output_tokens: NotRequired[int]


def read_token_texts(path: Path) -> list[TokenText]:
    """Read texts as JSON Lines of token ids.

    Every line is ``{"prompt_tokens": [...], "output_tokens": [...]}``, and optionally ``"domain"`` and
    ``"max_output_tokens"``; without the latter an output is assumed to have ended at its limit. Raises InputError with
    the number of an invalid line.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist; {WRITE}")
    texts = []
    with path.open("rb") as lines:
        for number, line in enumerate(bounded_lines(lines), start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            row = parse_json(line, place, _Row, invalid=WRITE)
            for name in ("prompt_tokens", "output_tokens"):
                if not row[name] or not all(0 <= token <= MAX_TOKEN for token in row[name]):
                    raise InputError(f"{place}: {name!r} is not a list of token ids from 0 to {MAX_TOKEN}; {WRITE}")
            most = row.get("max_output_tokens", len(row["output_tokens"]))
            if not len(row["output_tokens"]) <= most <= MAX_TOKEN:
                raise InputError(f"{place}: {len(row['output_tokens'])} output tokens, more than {most}; {WRITE}")
            texts.append(TokenText(row["prompt_tokens"], row["output_tokens"], row.get("domain", "all"), most))
    if not texts:
        raise InputError(f"{path} is empty; {WRITE}")
    return texts


def lookup_trace(
    texts: Sequence[TokenText], rule: NgramRule, depth: int, *, vocabulary: int | None = None, source: str = "texts"
) -> Trace:
    """Record what prompt lookup proposes at every position of these outputs.

    texts : prompts and outputs, as token ids
    rule : what is looked up and copied
    depth : longest draft, in tokens
    vocabulary : vocabulary size, for the entropy of a lookup's proposal; default: the largest token id + 1
    source : where the texts are from, for the trace's metadata

    Any chain policy replays on it exactly, as the drafts depend on the text alone.

    Raises InputError for a depth outside of 1 to 255, no texts, or a vocabulary that does not hold all tokens.

    References: Saxena 2023, prompt lookup decoding.

    >>> from specsim.lookup.from_text import TokenText, lookup_trace
    >>> from specsim.lookup.ngram import RULES
    >>> trace = lookup_trace([TokenText([5, 6, 7, 5], [6, 7, 5, 8], "all", 4)], RULES["transformers"], 3)
    >>> trace.match_len.tolist()
    [3, 2, 1, 0]
    """
    vocabulary = _vocabulary(texts, depth, vocabulary)
    rows = [lookup_columns(rule, vocabulary, text.prompt, text.output, depth) for text in texts]
    facts = {"drafter": "prompt lookup", "drafter_kind": LOOKUP, "drafter_facts": asdict(rule)}
    return _as_trace(texts, rows, depth, source, facts)


def suffix_trace(
    texts: Sequence[TokenText],
    rule: SuffixRule,
    depth: int,
    *,
    vocabulary: int | None = None,
    source: str = "texts",
    progress: Counter = no_progress,
) -> Trace:
    """Record what suffix decoding proposes at every position of these outputs, in their order.

    texts : prompts and outputs, as token ids, in the order of the requests, which do not overlap
    rule : what is counted and how far it is continued
    depth : the engine's limit on a draft, in tokens, on which its choice among drafts depends: a draft of up to 8
        tokens need not begin like a draft of up to 4. A policy that drafts less cuts the draft short; record another
        trace for what the engine proposes under a lower limit
    vocabulary, source : as in `lookup_trace`
    progress : called with the texts done and their number

    The trace's `confidence` is a token's share of what followed where the text ended as here. The engine's
    probabilities are the products over a draft, its score their sum. Any chain policy replays exactly.

    Raises InputError as `lookup_trace`.

    References: Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975.

    >>> from specsim.lookup.from_text import TokenText, suffix_trace
    >>> from specsim.lookup.suffix import SuffixRule
    >>> texts = [TokenText([5, 6, 7, 5], [6, 7, 5, 8], "all", 4), TokenText([9], [6, 7, 5, 8], "all", 4)]
    >>> trace = suffix_trace(texts, SuffixRule(), 3)
    >>> trace.match_len.tolist()
    [1, 2, 1, 0, 0, 1, 2, 1]
    """
    vocabulary = _vocabulary(texts, depth, vocabulary)
    decoder, rows = SuffixDecoder(rule), []
    for done, text in enumerate(texts):
        progress(done, len(texts))
        rows.append(suffix_columns(decoder, vocabulary, text.prompt, text.output, depth))
    facts = {
        "drafter": "suffix decoding",
        "drafter_kind": SUFFIX,
        "drafter_facts": {**asdict(rule), "max_spec_tokens": depth},
    }
    return _as_trace(texts, rows, depth, source, facts)


def _vocabulary(texts: Sequence[TokenText], depth: int, vocabulary: int | None) -> int:
    """Return the vocabulary size (default: as small as the texts allow); raise InputError for wrong texts or depth."""
    if not texts or not 1 <= depth <= MAX_DEPTH:
        raise InputError(f"{len(texts)} texts, drafts of {depth} tokens; give some texts, and 1 to {MAX_DEPTH}")
    needed = 1 + max(max(*text.prompt, *text.output) for text in texts)
    if vocabulary is not None and vocabulary < needed:
        raise InputError(f"token {needed - 1} is beyond a vocabulary of {vocabulary}; give at least {needed}")
    return max(2, needed) if vocabulary is None else vocabulary


def _as_trace(
    texts: Sequence[TokenText], rows: Sequence[dict[str, Array]], depth: int, source: str, facts: dict[str, Any]
) -> Trace:
    """Build the trace of these texts from the columns of each; facts : of the drafter."""
    whole: dict[str, Any] = {name: np.concatenate([columns[name] for columns in rows]) for name in rows[0]}
    ids = str([(text.prompt, text.output) for text in texts])
    return Trace(
        meta={
            "target": source,
            **facts,
            "decoding": "unknown",
            "depth": depth,
            "eos_token_id": None,
            "prompts": {"source": source, "count": len(texts), "digest": digest(ids)},
            "dtype": "none",
            "device": "none",
        },
        sequence_id=np.arange(len(texts)),
        domain=np.array([text.domain for text in texts], dtype=np.str_),
        prompt_tokens=np.array([len(text.prompt) for text in texts]),
        prompt=np.concatenate([np.array(text.prompt, dtype=np.int32) for text in texts]),
        budget_tokens=np.array([text.max_output_tokens for text in texts]),
        offsets=np.concatenate([[0], np.cumsum([len(text.output) for text in texts])]).astype(np.int64),
        **whole,
    )
