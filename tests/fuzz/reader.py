"""A reader of files, as the fuzzer needs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import mutate

JSON, OTHER = "JSON", "Parquet, folders, zip"


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    family : JSON, or OTHER
    write : a valid file or folder at a path
    read : reads it, and uses what was read; what it returns is compared where a checksum covers it
    mutate : of the file's bytes
    file : of a folder the file that is mutated; "" for the path itself, several are taken in turn
    mend : what makes the checksums right again after the change; nothing where None
    covered : whether a checksum covers the file, so that what is accepted must read as the valid file
    """

    family: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    mutate: mutate.Mutate
    files: Sequence[str] = ("",)
    mend: Callable[[Path], object] | None = None
    covered: bool = False


def json_file(document: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(document))
