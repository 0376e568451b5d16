"""Import what engines and benchmarks wrote as traces, rounds or counters."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from specsim.engines.formats.records import ImportedRecords
from specsim.engines.formats.registry import read_format


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
