"""Files and folders written whole or not at all, and digests.

A kill leaves the old file or the new one, and beside it at most a hidden temporary one, which the next writer clears.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

AT_CWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
COMPRESSION_LEVEL = 9  # of Zstandard, for Parquet


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary file to write, which takes the place of `path` where the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_left(path)
    handle, name = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name(error, path)
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of `folder` where the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_left(folder)
    work = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
    try:
        yield work
        work.chmod(0o755)
        if not folder.exists():
            os.replace(work, folder)
            return
        _exchange(work, folder)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        _name(error, folder)
        raise
    shutil.rmtree(work)


def _name(error: BaseException, path: Path) -> None:
    """Let an error of writing, such as of a full disk, say what was to be written."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def clear_left(path: Path) -> None:
    """Remove what processes of this machine left beside a file or folder when they were killed while writing it."""
    prefix = f".{path.name}.{_machine()}-"
    for left in [one for one in path.parent.iterdir() if one.name.startswith(prefix)]:
        process = left.name.removeprefix(prefix).partition(".")[0]
        if process.isdecimal() and not _is_alive(int(process)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    """Of the temporary file or folder beside this one, which says whose it is."""
    return f".{path.name}.{_machine()}-{os.getpid()}."


def _machine() -> str:
    return digest(socket.gethostname(), length=6)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _exchange(new: Path, old: Path) -> None:
    """Let two folders change places, at once where the system can, so that a kill leaves one of them in the place."""
    with contextlib.suppress(AttributeError, OSError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        if rename(AT_CWD, os.fsencode(new), AT_CWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
            return
    aside = Path(tempfile.mkdtemp(prefix=_prefix(old), dir=old.parent))
    os.replace(old, aside)
    try:
        os.replace(new, old)
    except BaseException:
        os.replace(aside, old)
        raise
    os.replace(aside, new)


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
