"""Helpers that the readers of all formats share: lines of logs, JSON records, counts, and the rounds of requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsim.acceptance.sources import MOST_COUNT, MOST_DRAFTED, Rounds
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import bounded_lines, parse_json

MOST_BYTES = 2**31  # of a log
LONGEST_LINE = 2**16  # characters of a line of a log; engines print their settings in 10,000 or so
MOST_DIGITS = 17  # of a count as printed


class Request(NamedTuple):
    """The rounds of a request in their order, and its output tokens if known."""

    drafted: list[int]
    accepted: list[int]
    output_tokens: int | None = None

    def check(self, name: str) -> Request:
        """The request itself; InputError, which calls it `name`, where its counts contradict each other."""
        if len(self.drafted) != len(self.accepted):
            raise InputError(f"{name} drafts in {len(self.drafted)} rounds but accepts in {len(self.accepted)}")
        for number, (drafted, accepted) in enumerate(zip(self.drafted, self.accepted, strict=True)):
            if not 0 <= accepted <= drafted <= MOST_DRAFTED:
                raise InputError(
                    f"{name} accepts {accepted} of {drafted} drafted tokens in round {number + 1}; export again"
                )
        return self

    def is_whole(self, first: int) -> bool:
        """Whether the output's length shows that no round is missing; the last may be cut to its first token."""
        if self.output_tokens is None or not self.accepted:
            return False
        emitted = first + sum(self.accepted) + len(self.accepted)
        return emitted - self.accepted[-1] <= self.output_tokens <= emitted + 1


def rounds_of_requests(
    engine: str, requests: Sequence[Request], skipped: Skipped, *, definition: str = "", version: str = ""
) -> ImportedRecords:
    """Records of all rounds of these requests.

    Engines leave out rounds without a draft, so positions are known only where no round is missing.
    """
    if not sum(sum(request.drafted) for request in requests):
        raise InputError("nothing was drafted in any round; give the files of a speculative run")
    columns = [request.drafted for request in requests], [request.accepted for request in requests]
    drafted, accepted = (np.array([number for rounds in column for number in rounds], np.int64) for column in columns)
    sequence = np.repeat(np.arange(len(requests)), [len(request.drafted) for request in requests])
    first = 1  # token of the output comes from the prompt's pass
    unproven = sum(not request.is_whole(first) for request in requests)
    t, notes = (
        None,
        [f"the positions of rounds are unknown for {unproven:,} of {len(requests):,} requests: no column t"],
    )
    if not unproven:
        steps = [[first, *(1 + accepted for accepted in request.accepted[:-1])] for request in requests]
        t, notes = np.concatenate([np.cumsum(request_steps) for request_steps in steps]), []
    rounds = Rounds(drafted, accepted, None, sequence, t)
    lengths = lengths_of(requests)
    return ImportedRecords(
        rounds, engine, definition, version, len(requests), lengths, notes=tuple(notes), skipped=skipped
    )


def lengths_of(requests: Sequence[Request]) -> tuple[int, ...] | None:
    """Output tokens of every request, if known for all."""
    known = tuple(request.output_tokens for request in requests if request.output_tokens is not None)
    return known if known and len(known) == len(requests) else None


LEFT_OUT = "costs and commands leave out "


def left_out(options: Sequence[str]) -> list[str]:
    """A note on options of the server that costs and printed commands do not know; none without any."""
    return [f"{LEFT_OUT}the server's {' '.join(options)}: add to the command what it needs"] if options else []


def log_lines(paths: Sequence[Path], skipped: Skipped) -> Iterator[str]:
    """Lines of logs, file by file; lines too long to be an engine's statistics are skipped."""
    for path in paths:
        _check_size(path, "give the engine's log", "give the part that holds the run")
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in bounded_lines(file, LONGEST_LINE):
                if len(line) <= LONGEST_LINE:
                    yield line
                else:
                    skipped[f"lines of more than {LONGEST_LINE:,} characters"] += 1


def _check_size(path: Path, missing: str, large: str) -> None:
    if not path.is_file():
        raise InputError(f"{path} does not exist; {missing}")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"{path} is larger than {MOST_BYTES >> 30} GiB; {large}")


def json_records(
    paths: Sequence[Path], skipped: Skipped, *, invalid: str, noun: str = "record"
) -> list[tuple[str, dict[str, Any]]]:
    """Objects of JSON Lines, or of documents that are an object or a list of objects, each with its name for errors.

    A line cut off at a file's end is skipped. Of a captured stream of server-sent events, the chunks of a response are
    one object, in which later chunks replace what earlier ones say.
    """
    records: list[tuple[str, dict[str, Any]]] = []
    for path in paths:
        _check_size(path, invalid, "give a part of it")
        entries = _lines_of_json(path, invalid, skipped)
        if entries == []:
            entries = _responses_of_stream(path, invalid, skipped)
        if entries is None:
            document = parse_json(_finite(path.read_bytes()), str(path), invalid=invalid)
            entries = document if isinstance(document, list) else [document]
        for number, entry in enumerate(entries, start=1):
            if not isinstance(entry, dict):
                raise InputError(f"{path}: {noun} {number} is not an object; {invalid}")
            records.append((f"{path}, {noun} {number}", entry))
    return records


INFINITE = re.compile(rb":\s*-?(?:Infinity|NaN)\b")


def _finite(text: bytes) -> bytes:
    """JSON as Python's default writer leaves it, such as SGLang's request rate: what is not finite becomes null."""
    return INFINITE.sub(b": null", text)


STREAM = (b"data:", b"event:", b"id:", b"retry:", b":")  # what lines of server-sent events begin with


def _responses_of_stream(path: Path, invalid: str, skipped: Skipped) -> list[Any]:
    """The responses of a captured stream, each with what its chunks said last."""
    responses: list[dict[str, Any]] = []
    name: object = None
    with path.open("rb") as file:
        for number, line in enumerate(bounded_lines(file), start=1):
            content = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or content == b"[DONE]":
                name = None if content == b"[DONE]" else name
                continue
            try:
                chunk = parse_json(_finite(content), f"{path}, line {number}", invalid=invalid)
            except InputError:
                if file.read(1):
                    raise
                skipped["lines cut off at the end of a file"] += 1
                break
            if not isinstance(chunk, dict):
                raise InputError(f"{path}, line {number}: the stream's chunk is not an object; {invalid}")
            identity = chunk.get("id", "the only one")
            if identity != name:
                responses.append({})
            responses[-1].update({key: value for key, value in chunk.items() if value is not None})
            name = None if chunk.get("stop") is True else identity  # of llama-server's own stream, the last chunk
    return responses


def _lines_of_json(path: Path, invalid: str, skipped: Skipped) -> list[Any] | None:
    """Documents of JSON Lines; None if the first line is not an object, [] for a stream of server-sent events."""
    entries: list[Any] = []
    with path.open("rb") as file:
        for number, line in enumerate(bounded_lines(file), start=1):
            if not line.strip():
                continue
            if not entries and line.startswith(STREAM):
                return []
            try:
                entries.append(parse_json(_finite(line), f"{path}, line {number}", invalid=invalid))
            except InputError:
                if not entries:
                    return None
                if file.read(1):
                    raise
                skipped["lines cut off at the end of a file"] += 1
            if len(entries) == 1 and not isinstance(entries[0], dict):
                return None
    return entries


def count(value: Any, name: str, most: int = MOST_COUNT) -> int:
    """A count as printed, checked."""
    number = -1 if isinstance(value, str) and len(value) > MOST_DIGITS else int(value)
    if not 0 <= number <= most:
        raise InputError(f"{name} is {value!s:.30}; expected a count up to {most}; export again")
    return number


def by_number(histogram: Mapping[str, int], name: str) -> dict[int, int]:
    """A histogram whose JSON keys are numbers of tokens as text."""
    if not all(key.isascii() and key.isdigit() and len(key) < MOST_DIGITS for key in histogram):
        raise InputError(f"{name} has a key that is not a number of tokens; export again")
    counts = {int(key): count(times, name) for key, times in histogram.items()}
    if len(counts) < len(histogram) or any(times and tokens > MOST_DRAFTED for tokens, times in counts.items()):
        raise InputError(f"{name} has a number of tokens twice, or beyond {MOST_DRAFTED}; export again")
    return counts


def single_version(versions: Sequence[str]) -> str:
    """The version that a log names, or ""; InputError where it names several."""
    known = sorted(set(versions))
    if len(known) > 1:
        raise InputError(f"the log is of several versions ({', '.join(known)}); give the log of a single server")
    return known[0] if known else ""
