"""Optuna's journal storage: what a search has found so far on disk, so that a killed search resumes.

A file holds any number of studies. A digest of all that a search's answer depends on names its study, so that a search
never continues another's.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import lock_descriptor

from specsim.cost.model import SPACE
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.io.files import digest, nested_digest
from specsim.policy.base import Policy, Settings
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import optuna

FIRST_BYTES = b'{"op_code":'  # of Optuna's journal
PACKAGE = Path(__file__).parents[1]
DECIDING = ("trace", "lookup", "acceptance", "cost", "policy", "replaying", "learn")  # what an answer depends on
LONGEST_PASS = 512  # tokens


@contextmanager
def open_study(
    path: Path | None, name: str, direction: Literal["minimize", "maximize"] = "minimize"
) -> Iterator[optuna.Study]:
    """Open the study of this name in a journal file; in memory without a path.

    A last line without its end, which a kill left, is cut off. Raises InputError for a file that is not Optuna's
    journal or is damaged, and while another process has the file open.
    """
    import optuna  # slow to import, and a replay does not need it
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if path is None:
        yield optuna.create_study(direction=direction)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not lock_descriptor(handle, blocking=False):
            raise InputError(f"another process has {path} open; wait for it to end or give another file")
        written = path.read_bytes()
        if written[: len(FIRST_BYTES)] != FIRST_BYTES[: len(written)]:
            raise InputError(f"{path} is not a journal of Optuna's; give another file")
        os.ftruncate(handle, written.rfind(b"\n") + 1)
        lock: Any = threading.Lock()  # no other process writes to the file
        try:
            storage = JournalStorage(JournalFileBackend(str(path), lock))
            study = optuna.create_study(study_name=name, storage=storage, direction=direction, load_if_exists=True)
        except Exception as error:  # Optuna replays the lines unchecked
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(f"{path} is damaged ({reason:.100}); delete it to search anew") from None
        yield study
    finally:
        os.close(handle)


def job_name(job: Mapping[str, Any]) -> str:
    """Name a study by a digest of everything that determines its result."""
    return digest(json.dumps(job, sort_keys=True))


def describe_job(kind: type[Policy], priced: PricedTrace, fixed: Settings, search: Mapping[str, Any]) -> dict[str, Any]:
    """Describe everything that determines a search's result, as plain values and digests."""
    return {
        "policy": kind.name,
        "policy_source": source_digest(kind),
        "fixed": fixed,
        **search,
        "trace": trace_digest(priced.trace),
        "cost": cost_digest(priced),
        **program("optuna"),
    }


def program(*libraries: str) -> dict[str, Any]:
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
    passes = [cost.verify, cost.tree_verify] if trace.drafter_kind == SPACE else [cost.verify]
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
