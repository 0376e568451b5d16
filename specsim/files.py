"""Files and folders written whole or not at all, and digests.

A kill leaves the old file or the new one, and beside it at most a hidden temporary one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

COMPRESSION_LEVEL = 9  # of Zstandard, for Parquet


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary file to write, which takes the place of `path` where the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of `folder` where the block ends without an error.

    An old folder is moved aside for the moment in which the new one takes its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield work
        work.chmod(0o755)
        if not folder.exists():
            os.replace(work, folder)
            return
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        os.replace(folder, old)
        try:
            os.replace(work, folder)
        except BaseException:
            os.replace(old, folder)
            raise
        shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_text(path: Path | str, text: str) -> None:
    """Write a text file, UTF-8 with line feeds."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_table(table: pa.Table, path: Path | str) -> None:
    """Write a Parquet file: the bytes of floats apart, as they compress best so, and dictionaries of all else."""
    import pyarrow.parquet as pq

    floats: list[str] = []
    others: list[str] = []
    for field in table.schema:
        is_list = field.type.num_fields == 1
        kind = field.type.value_type if is_list else field.type
        names = floats if str(kind) in ("float", "double") else others
        names.append(f"{field.name}.list.element" if is_list else field.name)
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=others,
        use_byte_stream_split=floats,
    )


def write_json(document: Any, path: Path | str, *, indent: int = 1) -> None:
    """Write one JSON document and a line feed."""
    write_text(path, json.dumps(document, indent=indent) + "\n")


def read_json(path: Path, name: str, *, missing: str, invalid: str) -> Any:
    """The JSON document of a file, which errors call `name`; InputError says what to do where there is none."""
    if not path.is_file():
        raise InputError(f"{name} does not exist; {missing}")
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{name} is no valid JSON ({error}); {invalid}") from None


def digest(*parts: Any, length: int = 16) -> str:
    """The first hex digits of the SHA-256 of these strings and bytes, one after another."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()[:length]


def nested_digest(*parts: Any) -> str:
    """A digest of the parts' digests, which depends on where one part ends and the next begins."""
    return digest(*(bytes.fromhex(digest(part, length=64)) for part in parts))


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
