"""Import what engines and benchmarks wrote as traces, rounds or counters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from specsim.acceptance.sources import SLACK, Counters, Rounds, Source, as_source, describe, verified_by_depth
from specsim.engines.flags import FLAGS
from specsim.engines.formats.mixed import mixed_sources
from specsim.engines.formats.records import METADATA, ImportedRecords, Setup
from specsim.engines.formats.registry import FORMATS, read_any, read_format
from specsim.engines.rates import ASSUMED_ROUNDS, counters_of_length
from specsim.io.errors import InputError
from specsim.io.examples import is_example
from specsim.io.json import checked, from_keys, parse_json, read_json
from specsim.trace.trace import Trace

SourceLike = Source | ImportedRecords | str | PathLike[str] | Mapping[str, Any]  # as functions take what was accepted

ROUNDED = 0.02  # share by which drafted tokens per step may exceed K: the number of steps is off by a few a request
AGAIN = "write it anew by `specsim import`"
BY_AVERAGE = "acceptance by position is not told: every token is taken to be accepted as often, if those before it are"


def import_records(kind: str | None, files: str | PathLike[str] | Iterable[str | PathLike[str]]) -> ImportedRecords:
    """Read acceptance counts from an engine's logs or exports.

    Parameters
    ----------
    kind : str or None
        Format of the files, such as "vllm-log", "llamacpp-log" or "prometheus"; `specsim import --help` lists all.
        None: the format that the first file tells itself.
    files : str, Path, or several
        Files of this format, in their order.

    Returns
    -------
    ImportedRecords
        `source` is a trace, rounds or counters, None if the files hold only sums; `notes` name assumptions and missing
        fields; `write(path)` saves it for the commands, and `advise`, `diagnose` and `export_flags` take it directly.

    Raises
    ------
    InputError
        For an unknown kind, and files of another kind.

    Examples
    --------
    >>> import json, pathlib, tempfile, specsim
    >>> log = {"timings": {"draft_n": 40, "draft_n_accepted": 25, "predicted_n": 36}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "responses.jsonl")
    ...     _ = file.write_text(json.dumps(log))
    ...     records = specsim.import_records("llamacpp-responses", file)
    >>> records
    sums alone of llamacpp
    >>> records.to_dict()["averages"]["accepted / drafted"]
    0.625
    """
    paths = [Path(path) for path in ([files] if isinstance(files, str | PathLike) else files)]
    return read_any(paths)[1] if kind is None else read_format(kind, paths)


class Reading(NamedTuple):
    """Counts, and what they were taken for.

    source : trace, rounds or counters
    kind : a name of `FORMATS`, or "trace", "rounds" or "counters"
    name : of the file, "" if none
    setup : the server or run, as far as the file tells
    notes : assumptions, and what the file does not tell
    engine : the engine that wrote the file, if its flags are known
    """

    source: Source
    kind: str
    name: str = ""
    setup: Setup = Setup()
    notes: tuple[str, ...] = ()
    engine: str | None = None

    def __str__(self) -> str:
        form = FORMATS.get(self.kind)
        parts = [f"{self.kind} ({form.doc})" if form else self.kind]
        counted = describe(self.source)
        parts += [f"{counted['rounds']:,} rounds"] if "rounds" in counted else []
        if isinstance(self.source, Counters) and self.source.plain_steps:
            parts.append(f"{self.source.plain_steps:,} steps without a draft")
        setup = self.setup
        parts += [f"K = {setup.draft_tokens}"] if setup.draft_tokens else []
        parts += [f"{setup.running:.3g} request{'s' * (setup.running != 1)} at once"] if setup.running else []
        parts += [f"contexts of {setup.context:,} tokens"] if setup.context else []
        parts += [f"tp = {setup.tp}"] if (setup.tp or 1) > 1 else []
        parts += [f"{setup.weights} weights"] if setup.weights else []
        parts += [f"{setup.cache} KV cache"] if setup.cache else []
        parts += [" with ".join(filter(None, (setup.model, setup.method or setup.drafter)))]
        return f"{self.name + ' ' if self.name else ''}read as {', '.join(filter(None, parts))}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, without the counts."""
        return {"kind": self.kind, "name": self.name, **dataclasses.asdict(self.setup), "notes": [*self.notes]}


def read_counts(source: SourceLike, *, policy: str | None = None, k: int | None = None) -> Reading:
    """Read counts of accepted drafts from anything that holds them.

    Parameters
    ----------
    source : path, mapping, Counters, Rounds, Trace or ImportedRecords
        As `as_source` takes it, or a file of any format of `specsim import`, which its content tells.
    policy : str, optional
        Use only this policy's rounds of a file.
    k : int, optional
        Draft length, for files with sums or averages that do not tell it; of others, only their own.

    Returns
    -------
    Reading
        `source`, what it was taken for, and the server.

    Raises
    ------
    InputError
        For a file that holds nothing about drafts, for sums or averages without a draft length, and for `k` of a file
        that tells another.
    """
    reading = _read_counts(source, policy, k)
    if k is not None and k not in (told := len(verified_by_depth(reading.source)[0]), reading.setup.draft_tokens):
        raise InputError(f"{reading.name or 'the source'} tells its own draft length, K = {told}; leave out --k {k}")
    return reading


def _read_counts(source: SourceLike, policy: str | None, k: int | None) -> Reading:
    """What `read_counts` reads, whatever draft length it tells."""
    if isinstance(source, ImportedRecords):
        return _reading(source, source.engine, "", k)
    if not isinstance(source, str | PathLike):
        return Reading(read := as_source(source, policy=policy), _kind_of(read))
    path = Path(source)
    if not path.exists() and not is_example(path):
        raise InputError(f"{path} does not exist; give a trace, counters, or a log, a scrape or a result of an engine")
    if path.suffix == ".parquet" or not path.is_file() or _holds_trace_or_counters(path):
        read = as_source(source, policy=policy)
        return _with_origin(Reading(read, _kind_of(read), str(path)), path)
    kind, imported = read_any([path])
    if policy is not None:
        raise InputError(f"{path} is a log, which names no policies; leave out --policy")
    imported = dataclasses.replace(imported, notes=(*imported.notes, *mixed_sources(path)))
    try:
        return _reading(imported, kind, str(path), k)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _with_origin(reading: Reading, path: Path) -> Reading:
    """Complete what was read of a file by what `specsim import` wrote beside the counts, if it did."""
    origin: Any = None
    if isinstance(reading.source, Trace):
        origin = reading.source.meta.get("import")
    elif path.suffix == ".parquet":
        import pyarrow.parquet as pq

        origin = parse_json((pq.read_schema(path).metadata or {}).get(METADATA, b"null"), str(path), invalid=AGAIN)
    elif path.is_file():
        origin = read_json(path, str(path), Any, missing=AGAIN, invalid=AGAIN)
    if not isinstance(origin, dict) or "setup" not in origin:
        return reading
    checked(origin, str(path), _Origin, invalid=AGAIN)
    return reading._replace(
        setup=from_keys(origin["setup"], Setup, f"{path}: setup", AGAIN),
        notes=(*origin["notes"],),
        engine=origin["engine"] if origin["engine"] in FLAGS else None,
    )


class _Origin(TypedDict):
    engine: str
    notes: list[str]
    setup: dict[str, Any]


def as_counts(source: SourceLike, *, policy: str | None = None) -> Source:
    """The source that `read_counts` reads."""
    return read_counts(source, policy=policy).source


def _holds_trace_or_counters(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2**16)
    return head[:2] == b"PK" or all(re.search(rb'"%s"\s*:\s*\[' % key, head) for key in (b"drafted", b"accepted"))


def _kind_of(source: Source) -> str:
    return str(describe(source)["source"])


def _reading(imported: ImportedRecords, kind: str, name: str, k: int | None) -> Reading:
    source, setup, notes = imported.source, imported.setup, imported.notes
    if source is None:
        source, assumed = _of_sums(imported, k)
        setup, notes = dataclasses.replace(setup, draft_tokens=len(source.drafted)), (*notes, *assumed)
    elif isinstance(source, Rounds) and source.t is None and imported.plain_steps:
        source = _with_empty_rounds(source, imported.plain_steps)
    engine = imported.engine if imported.engine in FLAGS else None
    return Reading(source, kind, name, setup, notes, engine)


def _with_empty_rounds(rounds: Rounds, empty: int) -> Rounds:
    """Rounds beside as many that drafted nothing, whose requests and places are unknown."""
    drafted, accepted = (np.pad(column, (0, empty)) for column in (rounds.drafted, rounds.accepted))
    sequence = None if rounds.sequence_id is None else np.pad(rounds.sequence_id, (0, empty))
    return Rounds(drafted, accepted, None, sequence)


def _of_sums(imported: ImportedRecords, k: int | None) -> tuple[Counters, list[str]]:
    """Counters of sums or averages: the acceptance length is known, and acceptance falls alike by position."""
    if imported.trees:
        raise InputError(f"sums of draft trees do not give acceptance by position; {imported.instead}")
    rounds, drafted, accepted = imported.sums
    output = None if imported.output_tokens is None else sum(imported.output_tokens)
    first = imported.requests or 0
    notes = [BY_AVERAGE]
    k = k or imported.setup.draft_tokens
    if k is None and drafted and rounds:
        k = -(-drafted // rounds)
    steps = None if output is None or accepted is None else output - first - accepted  # if all draft
    if k is None and drafted and steps and drafted >= steps > 0:
        k = round(drafted / steps)
        k += drafted > (1 + ROUNDED) * k * steps  # drafts of K hold fewer tokens: some have one more
        notes.append(f"K = {k} is taken, as {drafted:,} tokens in {steps:,} steps are if all draft; --k gives another")
    if k is None:
        raise InputError(f"the draft length is not told; add --k (for acceptance by position, {imported.instead})")
    if rounds is None and drafted:
        rounds = -(-drafted // k)
        shorter = f"{drafted:,} drafted tokens are {rounds:,} drafts of K = {k}, or more that end early, as with p_min"
        if steps is None or accepted is None:
            notes.append(f"{shorter}: these are taken to be whole")
        elif steps > (1 + SLACK) * rounds and drafted > (k - 1) * steps:
            notes.append(f"{drafted:,} drafted tokens are taken to be {steps:,} drafts of {k - 1} or {k}")
            counters = _of_two_lengths(k, steps, drafted, accepted)
            return dataclasses.replace(counters, plain_steps=imported.plain_steps or 0, output_tokens=output), notes
        elif steps > (1 + SLACK) * rounds:
            raise InputError(
                f"{shorter}, in up to {steps:,} steps: leave --k out to take that many drafts of equal length, or "
                f"{imported.instead}"
            )
    length = imported.averages.get("accept len")
    if rounds and accepted is not None:
        length = 1 + accepted / rounds
    elif rounds and output:
        length = output / rounds
    elif output and length:
        rounds = round(output / length)
    if length is None:
        raise InputError(f"the number of rounds is not told; {imported.instead}")
    if rounds is None:
        notes.append(f"the number of rounds is not told: intervals are those of {ASSUMED_ROUNDS:,} rounds")
    counters = counters_of_length(length, k, rounds)
    plain = imported.plain_steps
    if plain is None and output and rounds and accepted is not None:
        plain = max(output - first - accepted - rounds, 0)
    unequal = drafted if drafted and rounds and drafted != rounds * k else None
    return dataclasses.replace(counters, plain_steps=plain, output_tokens=output, drafted_tokens=unequal), notes


def _of_two_lengths(k: int, rounds: int, drafted: int, accepted: int) -> Counters:
    """Counters of drafts of K - 1 or K tokens: every token is taken to be accepted as often, if those before it are."""
    from scipy.optimize import brentq  # slow to import

    by_depth = np.full(k, float(rounds))
    by_depth[-1] = drafted - (k - 1) * rounds
    depths = np.arange(1, k + 1)
    rate = brentq(lambda rate: float(by_depth @ rate**depths) - accepted, 0.0, 1.0)
    by_rate = np.rint(by_depth * rate**depths).astype(np.int64)
    return Counters(np.full(k, rounds), by_rate, drafted_tokens=drafted)


def read_length(length: float, k: int) -> Reading:
    """Counts of two numbers off a screen: acceptance length, with the target's own token, and draft length."""
    notes = (
        BY_AVERAGE,
        f"the number of rounds is not told: intervals are those of {ASSUMED_ROUNDS:,} rounds",
    )
    return Reading(
        counters_of_length(length, k, None), f"acceptance length {length:g}", "", Setup(draft_tokens=k), notes
    )
