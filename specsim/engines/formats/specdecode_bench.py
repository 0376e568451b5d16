"""SpecDecode-Bench's JSON Lines: for every position of an output how many tokens a round that starts there adds.

A record has `prompt_token_ids`, `generated_token_ids` and, of a drafter such as `acc_eagle`, `acc_len`, the bonus
included. That is a dense trace without the drafter's confidence. The data has no licence: nothing of it is shipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from specsim.acceptance.synthetic import uninformed
from specsim.arrays import IntArray
from specsim.engines.formats.imported import Imported, json_records
from specsim.errors import InputError
from specsim.json_files import checked
from specsim.trace.trace import MAX_DEPTH, STEP_LISTS, Trace

INVALID = "give SpecDecode-Bench's JSON Lines, with prompt_token_ids, generated_token_ids and acc_eagle.acc_len"
MOST_TOKEN = 2**31 - 2
NOT_TOLD = "not told"


class Lengths(TypedDict):
    """Of one drafter: tokens that a round starting after each output token, or before the first, too, adds."""

    acc_len: list[int]


class Tokens(TypedDict):
    """Of a request."""

    prompt_token_ids: list[int]
    generated_token_ids: list[int]


class Sequence_(NamedTuple):
    """Of a request: match lengths begin at 0."""

    prompt: list[int]
    output: list[int]
    match_len: list[int]
    domain: str


def read_dense(paths: Sequence[Path]) -> Imported:
    """A dense trace, of one drafter."""
    records, skipped = json_records(paths, invalid=INVALID)
    drafters = sorted({key for record in records for key in record if key.startswith("acc_")})
    if not drafters:
        raise InputError(f"{paths[0]} holds no acceptance lengths; {INVALID}")
    drafter = "acc_eagle" if "acc_eagle" in drafters else drafters[0]
    sequences, empty, late = [], 0, 0
    for number, record in enumerate(records):
        one = _sequence(record, drafter, f"record {number + 1}")
        if one is None:
            empty += 1
            continue
        late += len(record[drafter]["acc_len"]) < len(one.output)
        sequences.append(one)
    if empty:
        skipped[f"requests without an output, a prompt or {drafter}"] = empty
    depth = max((max(one.match_len) for one in sequences), default=0)
    if not depth:
        raise InputError(f"{paths[0]} holds no accepted drafts of {drafter}; {INVALID}")
    if depth > MAX_DEPTH:
        raise InputError(
            f"{paths[0]}: {depth} drafted tokens accepted at once, at most {MAX_DEPTH} can be; export again"
        )
    notes = [
        f"drafts are taken to be {depth} deep, as the longest accepted",
        "the drafter's confidence is not told: policies that look at it are left off boards",
        "tokens that were drafted and rejected are not told; others stand in their place",
    ]
    if late:
        notes.append(f"{late:,} requests begin after their first token: no draft is accepted before it")
    if len(drafters) > 1:
        notes.append(f"of the drafters {', '.join(drafters)}, {drafter} is read")
    definition = "acc_len = tokens that a round starting at a position adds, the bonus included"
    trace = _trace(sequences, depth, drafter.removeprefix("acc_"))
    lengths = tuple(trace.output_tokens.tolist())
    return Imported(
        trace, "specdecode-bench", definition, "", len(sequences), lengths, notes=tuple(notes), skipped=skipped
    )


def _sequence(record: Mapping[str, Any], drafter: str, name: str) -> Sequence_ | None:
    if drafter not in record:
        return None
    tokens = checked(record, name, Tokens, invalid=INVALID)
    lengths = checked(record[drafter], f"{name}: {drafter}", Lengths, invalid=INVALID)["acc_len"]
    prompt, output = tokens["prompt_token_ids"], tokens["generated_token_ids"]
    if not prompt or not output:
        return None
    if not all(0 <= token <= MOST_TOKEN for token in (*prompt, *output)):
        raise InputError(f"{name}: a token is outside 0 to {MOST_TOKEN}; {INVALID}")
    missing = len(output) - len(lengths)
    if missing not in (0, 1):
        raise InputError(f"{name}: {len(lengths)} lengths for {len(output)} output tokens; {INVALID}")
    if any(length < 1 for length in lengths):
        raise InputError(f"{name}: a length below 1 leaves out the bonus; {INVALID}")
    accepted = [0] * missing + [length - 1 for length in lengths]
    left = range(len(output), 0, -1)  # what is accepted beyond the output was never part of it
    domain = record.get("dataset", record.get("category"))
    named = domain if isinstance(domain, str) and domain else "imported"
    return Sequence_(prompt, output, list(map(min, accepted, left)), named)


def _trace(sequences: Sequence[Sequence_], depth: int, drafter: str) -> Trace:
    lengths = np.array([len(one.output) for one in sequences], dtype=np.int64)
    token = np.array([token for one in sequences for token in one.output], dtype=np.int32)
    match_len = np.array([length for one in sequences for length in one.match_len], dtype=np.uint8)
    depths = np.arange(1, depth + 1)
    reached = (match_len[:, None] >= depths).sum(axis=0)
    rates = reached / np.maximum(np.concatenate([[len(token)], reached[:-1]]), 1)
    blind = uninformed(np.clip(rates, 1e-6, 1.0), len(token))
    return Trace(
        meta={
            "target": NOT_TOLD,
            "drafter": drafter,
            "drafter_kind": "chain",
            "decoding": NOT_TOLD,
            "depth": depth,
            "eos_token_id": None,
            "dtype": NOT_TOLD,
            "device": NOT_TOLD,
            "informed": False,
        },
        sequence_id=np.arange(len(sequences)),
        domain=np.array([one.domain for one in sequences]),
        prompt_tokens=np.array([len(one.prompt) for one in sequences], dtype=np.int64),
        budget_tokens=lengths,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token=token,
        match_len=match_len,
        draft_token=_draft_tokens(token, match_len, depth),
        prob=blind["prob"],
        confidence=blind["confidence"],
        entropy_nats=blind["entropy_nats"],
        prompt=np.array([token for one in sequences for token in one.prompt], dtype=np.int32),
    )


def _draft_tokens(token: IntArray, match_len: IntArray, depth: int) -> IntArray:
    """Drafted tokens [N, D]: the output's own as far as they were accepted, then any others."""
    ahead = np.minimum(np.arange(len(token))[:, None] + np.arange(depth), len(token) - 1)
    truth = token[ahead]
    return np.where(np.arange(depth) < match_len[:, None], truth, truth + 1).astype(STEP_LISTS["draft_token"])
