"""Small joined traces: a prompt lookup, and drafters that are right at random."""

from __future__ import annotations

from typing import Any

import numpy as np

from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import RULES
from specsim.trace.joined import JoinedTrace, join_traces
from specsim.trace.trace import Trace

VOCABULARY, DEPTH = 6, 5


def texts(sequences: int = 6, seed: int = 0, budget: int = 24) -> list[TokenText]:
    """Random texts of few words, some of them shorter than their budget."""
    rng = np.random.default_rng(seed)

    def words(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    return [
        TokenText(words(3 + i), words(budget - 4 * (i % 2)), ("code", "prose")[i % 2], budget) for i in range(sequences)
    ]


def lookup_part(texts: list[TokenText], depth: int = DEPTH) -> Trace:
    """What prompt lookup proposes after these."""
    return lookup_trace(texts, RULES["specsim"], depth, vocabulary=VOCABULARY)


def guessing_part(texts: list[TokenText], rate: float, seed: int, depth: int = DEPTH) -> Trace:
    """A drafter whose tokens are right at this rate, surer where they are."""
    plain, rng = lookup_part(texts, depth), np.random.default_rng(seed)
    total = len(plain.token)
    truth = np.concatenate([plain.token, np.full(depth, -2)])[np.arange(total)[:, None] + np.arange(depth)]
    ends = np.repeat(plain.offsets[1:], plain.output_tokens)[:, None]
    inside = np.arange(total)[:, None] + np.arange(depth) < ends
    right = (rng.random((total, depth)) < rate) & inside
    confidence = np.clip(rng.random((total, depth)) + 0.3 * right, 0, 1).astype(np.float32)
    columns: dict[str, Any] = {
        "draft_token": np.where(right, truth, (truth + 1) % VOCABULARY).astype(np.int32),
        "match_len": np.logical_and.accumulate(right, axis=1).sum(axis=1).astype(np.uint8),
        "prob": confidence,
        "confidence": confidence,
        "entropy_nats": -np.log(np.maximum(confidence, 1e-3)),
    }
    meta = {**plain.meta, "drafter": f"guess {seed}", "drafter_kind": "model", "decoding": {"mode": "greedy"}}
    columns_of_plain = {name: getattr(plain, name) for name in Trace.__dataclass_fields__}
    return Trace(**{**columns_of_plain, **columns, "meta": {**meta, "target": "tiny", "eos_token_id": [VOCABULARY]}})


def joined_trace(sequences: int = 6, seed: int = 0, drafters: int = 3) -> JoinedTrace:
    """A lookup, and drafters that are right in 80 and 50 % of the tokens."""
    outputs = texts(sequences, seed)
    parts = {"lookup": lookup_part(outputs)}
    parts |= {
        f"guess {n}": guessing_part(outputs, rate, n) for n, rate in enumerate((0.8, 0.5)[: drafters - 1], start=1)
    }
    return join_traces(parts)
