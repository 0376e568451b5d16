"""The journal of a search: the results of each batch on disk, so that a killed search can resume.

JSON Lines: a header that identifies the search, then a line per finished batch. A search is a deterministic function
of its header and of its batches' results, so replaying the lines restores its state.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from specsim.cost.model import SPACE
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.io.files import nested_digest
from specsim.io.json import parse_json
from specsim.policy.base import Policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace

KIND, VERSION = "specsim-tuning", 1
PACKAGE = Path(__file__).parents[1]
DECIDING = ("trace", "lookup", "acceptance", "cost", "policy", "replaying", "learn")  # what an answer depends on
LONGEST_PASS = 512  # tokens
Line = dict[str, Any]


class Journal:
    """Finished batches, those on disk first. Without a path nothing is written.

    A last line without its end was torn by a kill and is cut off. Raises InputError for a file that is not a journal,
    is another search's, or is open in another process.

    ahead : lines of earlier runs that `batch` has not returned yet
    """

    def __init__(self, path: Path | None, job: Mapping[str, Any]) -> None:
        self.path = path
        self.ahead: list[Line] = []
        self._handle: int | None = None
        if path is None:
            return
        header = {"kind": KIND, "version": VERSION, **job}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(self._handle, path)
            lines = _whole_lines(path)
            if not lines:
                os.ftruncate(self._handle, 0)
                self._append(header)
                return
            _check_header(path, lines[0], json.loads(json.dumps(header)))
            self.ahead = [_parse(path, number, line) for number, line in enumerate(lines[1:], start=2)]
            os.ftruncate(self._handle, sum(len(line) + 1 for line in lines))
            os.lseek(self._handle, 0, os.SEEK_END)
        except BaseException:
            self.close()
            raise

    def batch(self, evaluate: Callable[[], Line]) -> Line:
        """Return the next batch: from an earlier run, or evaluated now and written."""
        if self.ahead:
            return self.ahead.pop(0)
        line = evaluate()
        self.keep(line)
        return line

    def keep(self, line: Line) -> None:
        """Write a line."""
        if self._handle is not None:
            self._append(line)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _append(self, line: Mapping[str, Any]) -> None:
        assert self._handle is not None
        data = memoryview(json.dumps(line, allow_nan=False).encode() + b"\n")
        while data:
            data = data[os.write(self._handle, data) :]
        os.fsync(self._handle)


def _lock(handle: int, path: Path) -> None:
    """One process per journal, where the system has such locks; they end with the process."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"{path} is open in another run; wait for it to end or give another file") from None


def _whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines. A file without complete lines must hold the start of a header."""
    *lines, torn = path.read_bytes().split(b"\n")
    start = json.dumps({"kind": KIND})[:-1].encode()
    if not lines and torn[: len(start)] != start[: len(torn)]:
        raise InputError(f"{path} is not the journal of a search; give another file")
    return lines


def _parse(path: Path, number: int, line: bytes) -> Line:
    value: Line = parse_json(line, f"{path}, line {number},", dict[str, Any], invalid="delete the file to search anew")
    return value


def _check_header(path: Path, line: bytes, expected: Line) -> None:
    try:
        header = _parse(path, 1, line)
    except InputError:
        header = {}
    if header.get("kind") != KIND:
        raise InputError(f"{path} is not the journal of a search; give another file")
    differing = [key for key in expected if header.get(key) != expected[key]]
    if differing:
        raise InputError(
            f"{path} is the journal of another search (differing: {', '.join(differing)}); "
            "give another file, or delete it to search anew"
        )


def describe_job(kind: type[Policy], priced: PricedTrace, fixed: Mapping[str, Any], search: Mapping[str, Any]) -> Line:
    """Describe everything that determines a search's result, as plain values and digests."""
    return {
        "policy": kind.name,
        "policy_source": source_digest(kind),
        "fixed": {key: fixed[key] for key in sorted(fixed)},
        **search,
        "trace": trace_digest(priced.trace),
        "cost": cost_digest(priced),
        **program(*(["optuna"] if search["search"] == "optuna" else [])),
    }


def program(*libraries: str) -> Line:
    """Describe the program: digest of the sources that results depend on, and versions of libraries."""
    files = [PACKAGE / "io" / "rng.py", *(path for room in DECIDING for path in sorted((PACKAGE / room).rglob("*.py")))]
    return {
        "program": nested_digest(*(path.read_bytes() for path in files)),
        "libraries": {name: version(name) for name in ("numpy", "scipy", *libraries)},
    }


def trace_digest(trace: Trace) -> str:
    """Compute a digest of a trace."""
    parts: list[Any] = [json.dumps(trace.meta, sort_keys=True, default=str).encode()]
    for name, value in vars(trace).items():
        if isinstance(value, np.ndarray) and name != "draft_limit":  # which is derived, and not always there
            parts += [name.encode(), _bytes_of(value)]
    if isinstance(trace, JoinedTrace):
        parts += [trace_digest(part).encode() for part in trace.parts]
    return nested_digest(*parts)


def cost_digest(priced: PricedTrace) -> str:
    """Compute a digest of all costs that a policy can meet on this trace, also of passes longer than its depth."""
    parts = [_bytes_of(value) for value in vars(priced.table()).values()]
    trace, cost = priced.trace, priced.cost
    ends = np.array(context_range(trace))
    passes = [cost.verify, cost.tree_verify] if trace.meta.get("drafter_kind") == SPACE else [cost.verify]
    for price in passes:
        for tokens in range(1, LONGEST_PASS + 1):
            try:
                parts.append(_bytes_of(np.asarray(price(tokens, ends))))
            except InputError:  # not profiled
                parts.append(b"")
    return nested_digest(*parts)


def source_digest(kind: type[Policy]) -> str:
    """Compute a digest of the policy's source file."""
    return nested_digest(Path(inspect.getfile(kind)).read_bytes())


def _bytes_of(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return f"{array.dtype}{array.shape}".encode() + array.tobytes() if array.dtype.kind == "U" else array.data
    return repr(value).encode()
