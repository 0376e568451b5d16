"""Keep the sequences of an unfinished recording beside it, so that an interrupted recording can be continued."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realrun.kept_files import read_kept
from realrun.proposals.recorder import Columns
from specsim.io.arrays import Ints
from specsim.io.files import remove_folder, replacing, write_text

IDENTITY = "recording.json"


def partial_of(trace: Path) -> Path:
    """Name the folder that holds the recorded sequences of an unfinished trace: OUT.partial beside OUT."""
    return trace.with_name(f"{trace.name}.partial")


def partial_identity(trace: Path) -> dict[str, Any] | None:
    """Read what the sequences beside a trace depend on; None if there are no sequences."""
    return read_kept(partial_of(trace) / IDENTITY)


class Recorded(NamedTuple):
    """A sequence: output tokens [N], columns of the trace, seconds of decoding and of recording."""

    tokens: Ints
    columns: Columns
    generate_s: float
    dense_s: float


class Partial:
    """A folder of recorded sequences (`partial_of`).

    trace : future folder of the trace; identity : everything that a sequence depends on, as JSON
    """

    def __init__(self, trace: Path, identity: Mapping[str, Any]):
        self.folder = partial_of(trace)
        self.identity = json.dumps(identity)

    def open(self) -> None:
        """Make the folder; drop sequences in it that were recorded with other settings."""
        path = self.folder / IDENTITY
        if not path.is_file() or path.read_bytes() != self.identity.encode():
            self.folder.mkdir(parents=True, exist_ok=True)  # the folder itself stays because it may be locked
            for other in self.folder.iterdir():
                other.unlink()
            write_text(path, self.identity)

    @property
    def count(self) -> int:
        """Count the sequences in the folder."""
        return sum(1 for _ in self.folder.glob("*.npz"))

    def get(self, number: int) -> Recorded | None:
        """Read a sequence that was recorded before; None if it is missing or damaged."""
        path = self._path(number)
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
            generate_s, dense_s = columns.pop("seconds").tolist()
            return Recorded(columns.pop("output"), columns, generate_s, dense_s)
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return None  # damaged: it is recorded again

    def put(self, number: int, sequence: Recorded) -> None:
        """Write a sequence."""
        with replacing(self._path(number)) as temporary, temporary.open("wb") as file:
            seconds = np.array([sequence.generate_s, sequence.dense_s])
            np.savez(file, output=sequence.tokens, seconds=seconds, **sequence.columns)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Remove the folder because the trace is complete."""
        remove_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"
