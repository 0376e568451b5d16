"""Sequences of a recording that is not whole yet, kept beside it so that an interrupted one goes on."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realrun.own_files import read_kept
from realrun.proposals.recorder import Columns
from specsim.io.arrays import Ints
from specsim.io.files import remove_folder, replacing, write_text

IDENTITY = "recording.json"


def partial_of(trace: Path) -> Path:
    """The folder of what there is of a trace that is not whole: OUT.partial beside OUT."""
    return trace.with_name(f"{trace.name}.partial")


def partial_identity(trace: Path) -> dict[str, Any] | None:
    """What the sequences kept beside a trace depend on, None where there are none."""
    return read_kept(partial_of(trace) / IDENTITY)


class Recorded(NamedTuple):
    """One sequence: output tokens [N], columns of the trace, seconds of decoding and of recording."""

    tokens: Ints
    columns: Columns
    generate_s: float
    dense_s: float


class Partial:
    """A folder of recorded sequences (`partial_of`); what other settings left there is dropped.

    Parameters
    ----------
    trace : Path
        Folder that the trace is to have.
    identity : mapping
        All that a sequence depends on, as JSON.
    """

    def __init__(self, trace: Path, identity: Mapping[str, Any]):
        self.folder = partial_of(trace)
        self.identity = json.dumps(identity)

    def open(self) -> None:
        """Make the folder, or find that it is of these settings; what is of others is dropped."""
        there = self.folder / IDENTITY
        if not there.is_file() or there.read_bytes() != self.identity.encode():
            self.folder.mkdir(parents=True, exist_ok=True)  # and keep it, as a lock may be on it
            for path in self.folder.iterdir():
                path.unlink()
            write_text(there, self.identity)

    @property
    def count(self) -> int:
        """Sequences that are kept."""
        return sum(1 for _ in self.folder.glob("*.npz"))

    def get(self, sequence: int) -> Recorded | None:
        """A sequence that was recorded before."""
        path = self._path(sequence)
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
            generate_s, dense_s = columns.pop("seconds").tolist()
            return Recorded(columns.pop("output"), columns, generate_s, dense_s)
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return None  # damaged: it is recorded again

    def put(self, sequence: int, one: Recorded) -> None:
        """Keep a sequence."""
        with replacing(self._path(sequence)) as temporary, temporary.open("wb") as file:
            seconds = np.array([one.generate_s, one.dense_s])
            np.savez(file, output=one.tokens, seconds=seconds, **one.columns)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Drop the folder, the trace being whole."""
        remove_folder(self.folder)

    def _path(self, sequence: int) -> Path:
        return self.folder / f"{sequence:06d}.npz"
