"""Write files and folders whole or not at all, and digest them.

A kill leaves the old file or the new file, and at most a hidden temporary file, which the next writer removes. Long
work locks its folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.io.errors import InputError, Interrupted

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

AT_CWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
COMPRESSION_LEVEL = 9  # of Zstandard, for Parquet
TRIAL_BYTES = 4096  # written to test a folder
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")  # of a file or folder while it is written; group 1 is its name
LEAST_LIMIT_BYTES, MOST_TIMES = 2**28, 100  # unpacked: allowed for any file, or this many times its size


@contextmanager
def working_in(folder: Path, how: str | None = "the same command goes on") -> Iterator[None]:
    """Lock a folder for long work.

    The folder is made and written to on entry, so that a full disk or a lack of permission is detected before the
    work. Temporary files of killed processes are removed, and so is the folder if it stays empty. A KeyboardInterrupt
    becomes Interrupted, which says `how` to resume (None for work that keeps nothing). Raises InputError if another
    process works there; its lock ends with that process.
    """
    _refuse_file(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_something(folder)
        with _locked(folder):
            _clear_dead(folder)
            yield
    except KeyboardInterrupt:
        if how is None:
            raise
        has_results = folder.is_dir() and any(folder.iterdir())
        raise Interrupted(
            f"what was done is kept in {folder}; {how}" if has_results else "nothing was kept so far"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            for path in missing:
                path.rmdir()


def check_writable(path: Path) -> None:
    """Check before the work that this file can be written: raise OSError, or InputError if it is a folder.

    Missing folders are not made yet.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file")
    if _is_device(path):
        return
    _write_something(next(parent for parent in path.resolve().parents if parent.exists()))


def _is_device(path: Path) -> bool:
    """Tell whether a path is a device or pipe, which can be written to but not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _refuse_file(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder")


def _write_something(folder: Path) -> None:
    """Raise OSError unless a file can be written to this folder."""
    with (
        _blamed_on(folder),
        tempfile.TemporaryFile(dir=folder) as file,  # unnamed, so that a kill leaves nothing behind
    ):
        file.write(bytes(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, where the system has locks; the lock is not a file in the folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not (_lock(handle) and _is_at(handle, folder)):  # it may have been removed in between
            raise InputError(f"another process works in {folder}; wait for it to end or give another folder")
        yield
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool = False, without: bool = True) -> bool:
    """Lock this open file or folder until it is closed or the process ends, and tell whether it is locked.

    without : what to return where the file system has no locks
    """
    from filelock import lock_descriptor  # slow to import

    try:
        return lock_descriptor(handle, blocking=wait)
    except OSError:
        return without


def _is_at(handle: int, path: Path) -> bool:
    """Tell whether the open file or folder is still at this path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give a temporary file to write, which replaces `path` when the block ends without an error.

    Symbolic links are followed: their target is replaced. A device or pipe is written to.
    """
    path = Path(path)
    with _blamed_on(path):
        if _is_device(path):
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder, path.name)
                with Path(folder, path.name).open("rb") as written, path.open("wb") as device:
                    shutil.copyfileobj(written, device)
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_left(path)
        with _temporary(path, lambda new: new.touch(exist_ok=False)) as temporary:
            yield temporary
            os.replace(temporary, path)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to fill, which replaces `folder` when the block ends without an error.

    Symbolic links are followed: their target is replaced.
    """
    _refuse_file(folder)
    with _blamed_on(folder):
        folder = folder.resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_left(folder)
        with _temporary(folder, Path.mkdir) as work:
            yield work
            if folder.exists():
                _exchange(work, folder)
            else:
                os.replace(work, folder)


def scratch_folder(path: Path) -> AbstractContextManager[Path]:
    """Give a hidden folder beside this path until the block ends; after a kill, the path's next writer removes it."""
    return _temporary(path, Path.mkdir)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists, at once: a kill leaves it whole or hidden, never in part."""
    if folder.is_dir():
        clear_left(folder)
        with _temporary(folder, Path.mkdir) as aside:
            os.replace(folder, aside)


@contextmanager
def _temporary(path: Path, create: Callable[[Path], None]) -> Iterator[Path]:
    """Create a hidden file or folder beside `path`, removed at the end if it still exists.

    It has the permissions of the existing `path`, else those that the umask leaves. It is locked, so that writers
    in other containers and on other machines see that it is in use.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        create(temporary)
        handle = os.open(temporary, os.O_RDONLY if temporary.is_dir() else os.O_RDWR)  # NFS locks what may be written
        _lock(handle, wait=True)
        if _is_at(handle, temporary):
            break
        os.close(handle)  # another process took it for left behind, before it was locked
    try:
        if path.exists():
            owner = stat.S_IRWXU if temporary.is_dir() else stat.S_IRUSR | stat.S_IWUSR  # to be written at all
            temporary.chmod(stat.S_IMODE(path.stat().st_mode) | owner)
        yield temporary
    finally:
        _remove(temporary)
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # another process may be clearing it, too
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _blamed_on(path: Path) -> Iterator[None]:
    """Report an OSError about a temporary or unnamed file as an error about this path, which the user knows."""
    try:
        yield
    except OSError as error:
        name = Path(os.fsdecode(error.filename)).name if error.filename else ""
        if error.errno and (not name or name.startswith("tmp") or TEMPORARY.fullmatch(name)):
            error.filename = str(path)
        raise


def clear_left(path: Path) -> None:
    """Remove the temporary files that killed writers of this file or folder left beside it."""
    if path.parent.is_dir():
        _clear_dead(path.parent, path.name)


def _clear_dead(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders without a live writer, of paths of this name or of all paths."""
    for left in [*folder.iterdir()]:
        match = TEMPORARY.fullmatch(left.name)
        if match is None or name not in (None, match[1]):
            continue
        try:
            handle = os.open(left, (os.O_RDONLY if left.is_dir() else os.O_RDWR) | getattr(os, "O_NOFOLLOW", 0))
        except OSError:  # gone, or somebody else's
            continue
        with contextlib.suppress(OSError):
            if _lock(handle, without=False):
                _remove(left)
        os.close(handle)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders, atomically where the system can: a kill between two renames would leave neither in place."""
    with contextlib.suppress(AttributeError, OSError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        if rename(AT_CWD, os.fsencode(new), AT_CWD, os.fsencode(old), RENAME_EXCHANGE) == 0:
            return
    with _temporary(old, Path.mkdir) as aside:
        os.replace(old, aside)
        try:
            os.replace(new, old)
        except BaseException:
            os.replace(aside, old)
            raise


def write_text(path: Path | str, text: str) -> None:
    """Write a text file, UTF-8 with line feeds."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_table(table: pa.Table, path: Path | str) -> None:
    """Write a Parquet file: floats split into byte streams, which compress best, all else as dictionaries."""
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
    """Write a JSON document and a line feed."""
    write_text(path, json.dumps(document, indent=indent) + "\n")


def read_csv(path: Path, name: str, wanted: str) -> pd.DataFrame:
    """Read the cells of a CSV file as text, with the columns of its first line.

    name : of the file, in errors; wanted : advice that ends errors

    Raises InputError for any other file, and for a line with more cells than the first line.
    """
    import pandas as pd  # slow to import

    if not path.is_file():
        raise InputError(f"{name} does not exist; {wanted}")
    try:
        frame = pd.read_csv(path, dtype=str)
    except ValueError as error:  # also of text that is no UTF-8
        raise InputError(f"{name} is not a CSV file ({str(error).strip()}); {wanted}") from None
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes the cells in front as names of the lines
        raise InputError(f"{name} has lines with more cells than its first line; {wanted}")
    return frame


def digest(*parts: Any, length: int = 16) -> str:
    """Compute the first hex digits of the SHA-256 of these strings and bytes, concatenated."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()[:length]


def nested_digest(*parts: Any) -> str:
    """Compute a digest of the parts' digests, which depends on the boundaries between parts."""
    return digest(*(bytes.fromhex(digest(part, length=64)) for part in parts))


def unpacked_limit_bytes(path: Path) -> int:
    """Return the bytes that a compressed file may take unpacked; larger files are rejected as damaged."""
    return max(LEAST_LIMIT_BYTES, MOST_TIMES * path.stat().st_size)


def file_digest(path: Path) -> str:
    """Compute the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
