"""Import what engines and benchmarks wrote as traces, rounds or counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from specsim.acceptance.sources import Source, as_source
from specsim.engines.formats.records import ImportedRecords
from specsim.engines.formats.registry import FORMATS, read_format
from specsim.io.errors import InputError

SourceLike = Source | ImportedRecords | str | PathLike[str] | Mapping[str, Any]  # as functions take what was accepted
LOG_MARKS = {"SpecDecoding metrics:": "vllm-log", "draft acceptance": "llamacpp-log", "Decode batch": "sglang-log"}


def import_records(kind: str, files: str | PathLike[str] | Iterable[str | PathLike[str]]) -> ImportedRecords:
    """Read acceptance counts from an engine's logs or exports.

    Parameters
    ----------
    kind : str
        Format of the files, such as "vllm-log", "llamacpp-log" or "prometheus"; `specsim import --help` lists all.
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
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    return read_format(kind, [Path(path) for path in paths])


def as_counts(source: SourceLike, *, policy: str | None = None) -> Source:
    """Read counts as `as_source` does, also from imported records and an engine's log; InputError for sums alone."""
    if isinstance(source, ImportedRecords):
        if source.source is None:
            raise InputError(f"sums and averages do not give acceptance by position; {source.instead}")
        return source.source
    if isinstance(source, str | PathLike) and (path := Path(source)).is_file() and path.suffix in (".log", ".txt"):
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(2**20)
        kind = next((kind for mark, kind in LOG_MARKS.items() if mark in text), None)
        if kind is None:
            raise InputError(f"{path} is not a log of {', '.join(LOG_MARKS.values())}; see `specsim import --help`")
        if policy is not None:
            raise InputError(f"{path} is a log, which names no policies; leave out --policy")
        return as_counts(FORMATS[kind].read([path]))
    return as_source(source, policy=policy)
