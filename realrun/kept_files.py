"""Keep files of an unfinished job in its folder, read them on the next start, and refuse those of other settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.json import read_json

MAX_BYTES = 2**30  # of a file
LOG_LINES, LOG_LETTERS = 3, 400  # of a failed process's log that an error repeats, at most


def read_own(path: Path, shape: Any = dict[str, Any], *, again: str) -> dict[str, Any]:
    """Read the JSON object of a file, of this shape. again : how to begin anew, as InputError says"""
    return dict(read_json(path, str(path), shape, missing=again, invalid=again, max_bytes=MAX_BYTES))


def read_kept(path: Path, shape: Any = dict[str, Any]) -> dict[str, Any] | None:
    """Read the JSON object of a file; None if the file is missing or damaged, because it is made again then."""
    try:
        return read_own(path, shape, again="make it again")
    except InputError:
        return None


def refuse_other(what: str, settings: Mapping[str, Any], wanted: Mapping[str, Any], instead: str) -> None:
    """Raise InputError that names the first of the wanted settings that differs.

    what : what has these settings, a sentence that goes on with "with"; instead : what to do
    """
    for key, value in wanted.items():
        if settings.get(key) != value:
            raise InputError(
                f"{what} with {key}={json.dumps(settings.get(key))}, asked for {json.dumps(value)}; {instead}"
            )


def claim(path: Path, identity: Mapping[str, Any], what: str, instead: str, shape: Any = dict[str, Any]) -> None:
    """Write an identity to its file, or raise InputError if the file holds another.

    what, instead : as of `refuse_other`; shape : of the document
    """
    if not path.is_file():
        write_json(identity, path)
    refuse_other(what, read_own(path, shape, again=instead), identity, instead)


def refuse_file(folder: Path) -> None:
    """Raise InputError if a file is in the folder's place."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder as --out")


def log_end(log: str) -> str:
    """Join the last lines of a failed process's log into a single line, for an error message."""
    return " / ".join(log.strip().splitlines()[-LOG_LINES:])[:LOG_LETTERS]
