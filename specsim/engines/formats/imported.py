"""What a reader of an engine's files gives, and what all of these readers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specsim.acceptance.sources import (
    MOST_COUNT,
    MOST_DRAFTED,
    Counters,
    Rounds,
    Source,
    as_source,
    longest_rounds,
)
from specsim.engines.conventions import CONVENTIONS, Conventions
from specsim.engines.definitions import DEFINITIONS, Totals
from specsim.errors import InputError
from specsim.json_files import bounded_lines, parse_json, read_json
from specsim.trace.trace import Trace

MOST_BYTES = 2**31  # of a log
LONGEST_LINE = 2**16  # characters of a line of a log; engines print their settings in 10,000 or so
MOST_DIGITS = 17  # of a count as printed


@dataclass(frozen=True)
class Imported:
    """What an engine's files hold.

    Parameters
    ----------
    source : Trace, Rounds, Counters or None
        What specsim fits to and replays; None where the files give sums or averages alone, of which no acceptance by
        position follows.
    engine : str
        Whose numbers these are.
    definition : str
        What the numbers mean, in words.
    version : str
        Of the engine, as the files name it; "" where they do not.
    requests : int or None
        How many; None where the files do not tell.
    output_tokens : tuple of int or None
        Of every request, or of all in one number.
    sums : tuple
        Rounds, drafted and accepted tokens where there is no source; None for what is not told.
    averages : mapping
        Numbers as printed, where their counts are not.
    notes : tuple of str
        What was taken for granted, and what the files do not tell.
    skipped : mapping
        Why, and how many lines or requests.
    instead : str
        What to import, where there is no source.
    """

    source: Source | None
    engine: str
    definition: str
    version: str = ""
    requests: int | None = None
    output_tokens: tuple[int, ...] | None = None
    sums: tuple[int | None, int | None, int | None] = (None, None, None)
    averages: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    instead: str = ""

    @property
    def conventions(self) -> Conventions | None:
        """How the engine runs and counts rounds, where that is known."""
        return CONVENTIONS.get(self.engine)

    @property
    def totals(self) -> Totals | None:
        """Of the rounds that the engine counts; None where only sums are known."""
        output = np.nan if self.output_tokens is None else float(sum(self.output_tokens))
        if isinstance(self.source, Counters):
            drafted, accepted = self.source.drafted, self.source.accepted
            return Totals(int(drafted[0]), int(drafted.sum()), int(accepted.sum()), output, self.source)
        if self.source is None:
            return None
        return Totals.of(longest_rounds(self.source) if isinstance(self.source, Trace) else self.source, output)


SourceLike = Source | Imported | str | PathLike[str] | Mapping[str, Any]  # as functions take what was accepted


def as_counts(source: SourceLike, *, policy: str | None = None) -> Source:
    """As `as_source`, and of what was imported its counts; InputError where no acceptance by position follows."""
    if not isinstance(source, Imported):
        return as_source(source, policy=policy)
    if source.source is None:
        raise InputError(f"of sums and averages no acceptance by position follows; {source.instead}")
    return source.source


class Request(NamedTuple):
    """The rounds of a request in their order, and its output tokens where told."""

    drafted: list[int]
    accepted: list[int]
    output_tokens: int | None = None


def definition_of(engine: str) -> str:
    """What an engine's numbers mean, in words."""
    return "; ".join(f"{one.printed} = {one.formula}" for one in DEFINITIONS if one.engine == engine)


def check_request(request: Request, name: str) -> None:
    """InputError, which calls it `name`, where its counts cannot be."""
    if len(request.drafted) != len(request.accepted):
        raise InputError(f"{name} drafts in {len(request.drafted)} rounds but accepts in {len(request.accepted)}")
    for number, (drafted, accepted) in enumerate(zip(request.drafted, request.accepted, strict=True)):
        if not 0 <= accepted <= drafted <= MOST_DRAFTED:
            raise InputError(
                f"{name} accepts {accepted} of {drafted} drafted tokens in round {number + 1}; export again"
            )


def as_rounds(requests: Sequence[Request], *, first: int = 1) -> tuple[Rounds, list[str]]:
    """The rounds of all requests, and what is to be said of them.

    Engines leave out rounds without a draft. Positions are known only where the output's length shows that none is
    missing, but for the last, which has room for one token. `first` : tokens of the output before the first round
    """
    if not sum(sum(request.drafted) for request in requests):
        raise InputError("nothing was drafted in any round; give the files of a speculative run")
    lengths = [len(request.drafted) for request in requests]
    drafted, accepted = (
        np.array([number for request in requests for number in column(request)], dtype=np.int64)
        for column in (lambda request: request.drafted, lambda request: request.accepted)
    )
    sequence = np.repeat(np.arange(len(requests)), lengths)
    unproven = sum(not _is_whole(request, first) for request in requests)
    if unproven:
        told = f"where rounds begin is not told for {unproven:,} of {len(requests):,} requests: no column t"
        return Rounds(drafted, accepted, None, sequence, None), [told]
    starts = [first + np.cumsum([0, *request.accepted]) + np.arange(len(request.accepted) + 1) for request in requests]
    return Rounds(drafted, accepted, None, sequence, np.concatenate([start[:-1] for start in starts])), []


def _is_whole(request: Request, first: int) -> bool:
    if request.output_tokens is None or not request.accepted:
        return False
    emitted = first + sum(request.accepted) + len(request.accepted)
    return emitted - request.accepted[-1] <= request.output_tokens <= emitted + 1


def lengths_of(requests: Sequence[Request]) -> tuple[int, ...] | None:
    """Output tokens of every request, where they are told of all."""
    told = tuple(request.output_tokens for request in requests if request.output_tokens is not None)
    return told if told and len(told) == len(requests) else None


def log_lines(paths: Sequence[Path], skipped: Counter[str]) -> Iterator[str]:
    """Lines of logs, one file after another; those that are too long to be of an engine's statistics are counted."""
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path} does not exist; give the engine's log")
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path} is larger than {MOST_BYTES >> 30} GiB; give the part that holds the run")
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in bounded_lines(file, LONGEST_LINE):
                if len(line) <= LONGEST_LINE:
                    yield line
                else:
                    skipped[f"lines of more than {LONGEST_LINE:,} characters"] += 1


def json_records(paths: Sequence[Path], *, invalid: str) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Objects of JSON Lines, or of documents that are an object or a list of them; and lines cut off at files' ends."""
    found: list[dict[str, Any]] = []
    cut = 0
    for path in paths:
        lines = _lines_of_json(path, invalid)
        if lines is None:
            document = read_json(path, str(path), missing=invalid, invalid=invalid)
            records = document if isinstance(document, list) else [document]
        else:
            records, kept = lines
            cut += not kept
        for number, record in enumerate(records):
            if not isinstance(record, dict):
                raise InputError(f"{path}: record {number + 1} is no object; {invalid}")
        found += records
    return found, {"lines cut off at the end of a file": cut} if cut else {}


def _lines_of_json(path: Path, invalid: str) -> tuple[list[Any], bool] | None:
    """Documents of JSON Lines and whether the last is whole; None where the first line is no object."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; {invalid}")
    if path.stat().st_size > MOST_BYTES:
        raise InputError(f"{path} is larger than {MOST_BYTES >> 30} GiB; give a part of it")
    records: list[Any] = []
    with path.open("rb") as file:
        for number, line in enumerate(bounded_lines(file)):
            if not line.strip():
                continue
            try:
                records.append(parse_json(line, f"{path}, line {number + 1}", invalid=invalid))
            except InputError:
                if not records:
                    return None
                if file.read(1):
                    raise
                return records, False
            if len(records) == 1 and not isinstance(records[0], dict):
                return None
    return records, True


def count(value: Any, name: str, most: int = MOST_COUNT) -> int:
    """A count as printed, checked."""
    number = -1 if isinstance(value, str) and len(value) > MOST_DIGITS else int(value)
    if not 0 <= number <= most:
        raise InputError(f"{name} is {value!s:.30}, no count up to {most}; export again")
    return number


def by_number(histogram: Mapping[str, int], name: str) -> dict[int, int]:
    """A histogram that JSON keys by text; InputError where a key is no number of tokens, or comes twice."""
    if not all(key.isascii() and key.isdigit() and len(key) < MOST_DIGITS for key in histogram):
        raise InputError(f"{name} has a key that is no number of tokens; export again")
    found = {int(key): count(times, name) for key, times in histogram.items()}
    if len(found) < len(histogram) or any(times and tokens > MOST_DRAFTED for tokens, times in found.items()):
        raise InputError(f"{name} has a number of tokens twice, or beyond {MOST_DRAFTED}; export again")
    return found


def one_version(found: Sequence[str]) -> str:
    """The version that a log names; InputError where it names several."""
    versions = sorted(set(found))
    if len(versions) > 1:
        raise InputError(f"the log is of several versions ({', '.join(versions)}); give one server's at a time")
    return versions[0] if versions else ""
