"""SpecDecode-Bench's JSON Lines: for every position of an output, how many tokens a round that starts there adds.

A record has `prompt_token_ids` and, for each drafter such as `acc_eagle`, `acc_len` with the bonus token included. That
is a dense trace without the drafter's confidence. The record's `generated_token_ids` come from another run than
EAGLE's lengths: in about half of the published records their numbers differ. So the lengths are read, but no text. The
data has no licence: nothing of it is shipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsim.acceptance.models import uninformed
from specsim.engines.formats.reading import json_records
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.arrays import IntArray
from specsim.io.errors import InputError
from specsim.trace.trace import MAX_DEPTH, STEP_LISTS, Trace

INVALID = "give SpecDecode-Bench's JSON Lines, with prompt_token_ids and acc_eagle.acc_len in every record"
UNKNOWN = "not told"
ACCEPTED, REJECTED = 0, 1  # token ids that stand for the text


class MatchLengths(NamedTuple):
    """A request: its prompt's length, accepted tokens at every position, and its domain."""

    prompt_tokens: int
    match_len: list[int]
    domain: str


def read_dense(paths: Sequence[Path]) -> ImportedRecords:
    """Read a dense trace of a drafter; requests with unreadable lengths are skipped."""
    skipped = Skipped()
    records = [(path.stem, record) for path in paths for _, record in json_records([path], skipped, invalid=INVALID)]
    drafters = sorted({key for _, record in records for key in record if key.startswith("acc_")})
    if not drafters:
        raise InputError(f"{paths[0]} holds no acceptance lengths; {INVALID}")
    drafter = "acc_eagle" if "acc_eagle" in drafters else drafters[0]
    sequences: list[MatchLengths] = []
    differences: list[int] = []
    for name, record in records:
        request = _request(record, drafter, name)
        if isinstance(request, str):
            skipped[request] += 1
            continue
        sequences.append(request)
        text = record.get("generated_token_ids")
        if isinstance(text, list) and len(text) != len(request.match_len):
            differences.append(len(request.match_len) - len(text))
    if not sequences:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in skipped.items())
        raise InputError(f"{paths[0]}: no acceptance lengths can be read ({reasons}); {INVALID}")
    depth = max(max(request.match_len) for request in sequences)
    if not depth:
        raise InputError(f"{paths[0]} holds no accepted drafts of {drafter}; {INVALID}")
    notes = [
        f"drafts are taken to be {depth} deep, as the longest accepted",
        "the drafter's confidence is unknown: policies that read it are left off leaderboards",
        "only the lengths are read, no text: the trace cannot be joined with another",
    ]
    if differences:
        notes.append(
            f"{len(differences):,} of {len(sequences):,} requests have lengths for another number of tokens than "
            f"their text ({min(differences):+,} to {max(differences):+,}): these come from different runs"
        )
    if len(drafters) > 1:
        notes.append(f"of the drafters {', '.join(drafters)}, {drafter} is read")
    trace = _trace(sequences, depth, drafter.removeprefix("acc_"))
    return ImportedRecords(
        trace,
        "specdecode-bench",
        "acc_len = tokens that a round starting at a position adds, the bonus included",
        requests=len(sequences),
        output_tokens=tuple(trace.output_tokens.tolist()),
        notes=tuple(notes),
        skipped=skipped,
    )


def _request(record: Mapping[str, Any], drafter: str, name: str) -> MatchLengths | str:
    """The request, or the reason to skip it. `name` : default of its domain"""
    prompt, accepted = record.get("prompt_token_ids"), record.get(drafter)
    lengths = accepted.get("acc_len") if isinstance(accepted, dict) else None
    if not lengths or not isinstance(lengths, list):
        return f"requests without {drafter}.acc_len"
    if not all(type(length) is int and 1 <= length <= MAX_DEPTH + 1 for length in lengths):
        return f"requests with lengths that are not whole numbers from 1 to {MAX_DEPTH + 1}"
    if not prompt or not isinstance(prompt, list):
        return "requests without prompt_token_ids"
    left = range(len(lengths), 0, -1)  # what is accepted beyond the output was never part of it
    named = record.get("dataset", record.get("category"))
    domain = named if isinstance(named, str) and named else name
    match_len = [min(length - 1, most) for length, most in zip(lengths, left, strict=True)]
    return MatchLengths(len(prompt), match_len, domain)


def _trace(sequences: Sequence[MatchLengths], depth: int, drafter: str) -> Trace:
    lengths = np.array([len(request.match_len) for request in sequences], dtype=np.int64)
    match_len = np.array([length for request in sequences for length in request.match_len], dtype=np.uint8)
    depths = np.arange(1, depth + 1)
    reached = (match_len[:, None] >= depths).sum(axis=0)
    rates = reached / np.maximum(np.concatenate([[len(match_len)], reached[:-1]]), 1)
    blind = uninformed(np.clip(rates, 1e-6, 1.0), len(match_len))
    return Trace(
        meta={
            "target": UNKNOWN,
            "drafter": drafter,
            "drafter_kind": "chain",
            "decoding": UNKNOWN,
            "depth": depth,
            "eos_token_id": None,
            "dtype": UNKNOWN,
            "device": UNKNOWN,
            "informed": False,
            "text": False,
        },
        sequence_id=np.arange(len(sequences)),
        domain=np.array([request.domain for request in sequences]),
        prompt_tokens=np.array([request.prompt_tokens for request in sequences], dtype=np.int64),
        budget_tokens=lengths,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token=np.full(len(match_len), ACCEPTED, dtype=np.int32),
        match_len=match_len,
        draft_token=_draft_tokens(match_len, depth),
        prob=blind["prob"],
        confidence=blind["confidence"],
        entropy_nats=blind["entropy_nats"],
    )


def _draft_tokens(match_len: IntArray, depth: int) -> IntArray:
    """Drafted tokens [N, D]: an id for accepted tokens, another id for the others."""
    accepted = np.arange(depth) < match_len[:, None]
    return np.where(accepted, ACCEPTED, REJECTED).astype(STEP_LISTS["draft_token"])
