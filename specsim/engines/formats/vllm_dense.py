"""Dense traces recorded inside vLLM, whose plugin writes a folder for every start of a server.

Such a folder holds engine.json (the server), requests.jsonl (a line for every request) and drafts.npy: a row for every
output token, with the draft behind it. The first position of an output has no draft, because vLLM emits the first token
with the prompt. The plugin is `realrun.engines.processes.vllm_recorder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
from msgspec import Meta

from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.arrays import Array, Ints
from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import parse_json, read_json
from specsim.trace.files import check_values
from specsim.trace.joined import LOOKUP, SUFFIX
from specsim.trace.trace import MAX_DEPTH, NO_TOKEN, Trace

FACTS, REQUESTS, DRAFTS = "engine.json", "requests.jsonl", "drafts.npy"
COLUMNS = ("request", "position", "token", "draft", "prob", "entropy_nats", "top10_confidence")
AGAIN = "record again, or remove this folder"
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
KINDS = {"ngram": LOOKUP, "suffix": SUFFIX}  # of drafters that have a name of their own here, by vLLM's method


class Facts(TypedDict):
    """About a server, in engine.json."""

    name: str
    version: str
    runner: str
    method: str
    target: str
    drafter: str
    drafter_facts: dict[str, Any]
    vocabulary: Count
    eos_token_id: Token | list[Token] | None
    dtype: str
    device: str
    max_num_batched_tokens: Count
    max_num_seqs: Count
    depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH)]


class Request(TypedDict):
    """A request; forced_tokens: length of the text that was forced on it, None if vLLM chose the tokens."""

    request: Token
    id: str
    prompt_tokens: Annotated[list[Token], Meta(min_length=1)]
    max_output_tokens: Count | None
    temperature: Annotated[float, Meta(ge=0)]
    forced_tokens: Token | None


class Part(NamedTuple):
    """What was recorded of a server. rows : of all requests, in the order of the steps"""

    facts: Facts
    requests: list[Request]
    rows: Array


def read_part(folder: Path) -> Part:
    """Read what was recorded of a server; InputError if the folder does not hold it."""
    facts = read_json(folder / FACTS, str(folder / FACTS), Facts, missing=AGAIN, invalid=AGAIN)
    try:
        described, _, cut = (folder / REQUESTS).read_bytes().rpartition(b"\n")
        rows = read_rows(folder / DRAFTS)
    except (OSError, ValueError, SyntaxError, TokenError) as error:
        raise InputError(f"{folder} holds no recorded drafts ({error}); {AGAIN}") from None
    if rows.dtype.names != COLUMNS or rows["draft"].shape[1:] != (facts["depth"],):
        raise InputError(
            f"{folder / DRAFTS} has other columns than {', '.join(COLUMNS)}, of depth {facts['depth']}; {AGAIN}"
        )
    requests = [
        parse_json(line, str(folder / REQUESTS), Request, invalid=AGAIN) for line in described.split(b"\n") if line
    ]
    known = rows[rows["request"] < len(requests)] if cut else rows
    if ((known["request"] < 0) | (known["request"] >= len(requests))).any():
        raise InputError(f"{folder / DRAFTS} has rows of requests that {REQUESTS} does not describe; {AGAIN}")
    return Part(facts, requests, known)


def read_rows(file: Path) -> Array:
    """Read the rows of a recording: an npy header with their type, and rows up to the end of the file.

    A last row that is cut off, as a killed server leaves it, is dropped, and so is a last line of the requests.
    """
    with file.open("rb") as handle:
        np.lib.format.read_magic(handle)
        _, _, row = np.lib.format.read_array_header_1_0(handle)
        written = handle.read()
    if not row.itemsize or row.hasobject:
        raise ValueError("rows without columns")
    rows: Array = np.frombuffer(written[: len(written) // row.itemsize * row.itemsize], row)
    return rows


def engine_facts(facts: Facts) -> dict[str, Any]:
    """Make the key "engine" of a trace's metadata."""
    keys = ("name", "version", "runner", "max_num_batched_tokens", "max_num_seqs")
    return {**{key: value for key, value in facts.items() if key in keys}, "first_position_drafted": False}


def dense_columns(rows: Array, output: Ints, depth: int) -> dict[str, Any]:
    """Make a trace's columns of an output from the rows behind its tokens; row i drafts after i + 1 tokens."""
    total = len(output)
    source = np.maximum(np.arange(total) - 1, 0)  # of the first position, only so that quantiles stay those of drafts
    draft = rows["draft"][source]
    draft[0] = NO_TOKEN
    position = np.arange(total)[:, None] + np.arange(depth)
    match = (draft == output[np.minimum(position, total - 1)]) & (position < total)
    return {
        "token": np.asarray(output, dtype=np.int32),
        "match_len": np.logical_and.accumulate(match, axis=1).sum(axis=1).astype(np.uint8),
        "draft_token": draft,
        "confidence": rows["prob"][source],
        **{name: rows[name][source] for name in ("prob", "entropy_nats", "top10_confidence")},
    }


def read_dense(paths: Sequence[Path]) -> ImportedRecords:
    """Read folders that servers of the same models wrote; requests without a draft at every position are skipped."""
    folders = [part for path in paths for part in sorted(path.glob("part-*"), key=_number) or [path]]
    parts = [read_part(folder) for folder in folders]
    facts, skipped = parts[0].facts, Skipped()
    for folder, part in zip(folders, parts, strict=True):
        if other := [key for key, value in part.facts.items() if value != facts.get(key)]:
            raise InputError(f"{folder} was recorded with another {other[0]} than {folders[0]}; import them separately")
    texts = [text for part in parts for text in _texts(part, skipped)]
    if not texts:
        raise InputError(f"{paths[0]} holds no request with a draft at every position; {AGAIN}")
    depth = facts["depth"]
    columns = [dense_columns(text.rows, text.output, depth) for text in texts]
    requests, lengths = [text.request for text in texts], [len(text.output) for text in texts]
    whole: dict[str, Any] = {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}
    if blind := not whole["prob"].any():
        del whole["top10_confidence"]
    trace = Trace(
        meta={
            "target": facts["target"],
            "drafter": facts["drafter"],
            "drafter_kind": KINDS.get(facts["method"], facts["method"]),
            "drafter_facts": facts["drafter_facts"],
            "decoding": _decoding(requests),
            "depth": depth,
            "eos_token_id": facts["eos_token_id"],
            "vocabulary": {"tokens": facts["vocabulary"], "of": "the target"},
            "prompts": {
                "source": "requests",
                "count": len(texts),
                "digest": digest(str([request["prompt_tokens"] for request in requests])),
            },
            "dtype": facts["dtype"],
            "device": facts["device"],
            "informed": not blind,
            "engine": engine_facts(facts),
        },
        sequence_id=np.arange(len(texts)),
        domain=np.full(len(texts), "all"),
        prompt_tokens=np.array([len(request["prompt_tokens"]) for request in requests]),
        prompt=np.concatenate([np.array(request["prompt_tokens"], dtype=np.int32) for request in requests]),
        budget_tokens=np.array([_budget(text) for text in texts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        **whole,
    )
    check_values(trace, f"{paths[0]}", AGAIN)
    return ImportedRecords(
        trace,
        facts["name"],
        version=facts["version"],
        requests=len(texts),
        output_tokens=tuple(lengths),
        notes=_notes(facts, requests, blind=blind),
        skipped=skipped,
    )


class _Text(NamedTuple):
    """A request, its output tokens [N], and the rows behind them."""

    request: Request
    output: Ints
    rows: Array


def _number(part: Path) -> int:
    return int(part.name.partition("-")[2])


def _texts(part: Part, skipped: Skipped) -> list[_Text]:
    """Return the requests whose drafts are complete, and count the others."""
    order = np.argsort(part.rows["request"], kind="stable")
    ends = np.searchsorted(part.rows["request"][order], np.arange(len(part.requests)), side="right")
    texts = []
    for request, index in zip(part.requests, np.split(order, ends[:-1]), strict=True):
        rows = part.rows[index][: request["forced_tokens"]]
        if not len(rows):
            skipped["requests without output"] += 1
        elif (rows["position"] != np.arange(1, len(rows) + 1)).any():
            skipped["requests with steps that drafted nothing, near the server's longest text"] += 1
        else:
            texts.append(_Text(request, rows["token"].astype(np.int64), rows))
    return texts


def _budget(text: _Text) -> int:
    limit = text.request["forced_tokens"] or text.request["max_output_tokens"] or 0
    return max(limit, len(text.output))


def _decoding(requests: Sequence[Request]) -> str:
    if any(request["forced_tokens"] is not None for request in requests):
        return "unknown"
    return "greedy-draft" if any(request["temperature"] for request in requests) else "greedy"


def _notes(facts: Facts, requests: Sequence[Request], *, blind: bool) -> tuple[str, ...]:
    notes = ["vLLM drafts nothing ahead of an output's first token, so that the first position has no draft"]
    if blind:
        notes.append("the drafter has no probabilities: policies that read its confidence are left off leaderboards")
    if facts["method"] == "suffix":
        notes.append(f"the drafts are those under a limit of {facts['depth']} tokens, which decides among drafts")
    if forced := sum(request["forced_tokens"] is not None for request in requests):
        notes.append(f"the texts of {forced:,} of {len(requests):,} requests were given, not chosen by vLLM")
    return tuple(notes)
