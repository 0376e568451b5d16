"""Files and folders written whole or not at all, and digests.

A kill leaves the old file or the new one, and beside it at most a hidden temporary one, which the next writer clears.
Long work has its folder to itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.errors import InputError, Interrupted

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

AT_CWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
COMPRESSION_LEVEL = 9  # of Zstandard, for Parquet
TRIAL_BYTES = 4096  # written to see that a folder can be written to
LEAST_LIMIT_BYTES, MOST_TIMES = 2**28, 100  # unpacked: what any file may take, and how many times its own size


@contextmanager
def working_in(folder: Path, how: str = "the same command goes on") -> Iterator[None]:
    """Have a folder to oneself, for long work that keeps what is done and goes on from there.

    The folder is made and written to on entry, so that a full disk or a lack of permission is found before the work;
    what killed processes were writing into it is cleared, and it is removed again if nothing came to be in it. A
    KeyboardInterrupt becomes Interrupted, which says `how` to go on. InputError where another process works there; its
    lock ends with it.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_something(folder)
        with _locked(folder):
            _clear_dead(folder)
            yield
    except KeyboardInterrupt:
        kept = folder.is_dir() and any(folder.iterdir())
        what = f"what was done is kept in {folder}; {how}" if kept else "nothing was kept so far"
        raise Interrupted(what) from None
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()


def check_writable(path: Path) -> None:
    """Before the work that makes this file: OSError unless it can be written, InputError where a folder is there.

    Folders that are missing are not made yet.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file")
    _write_something(next(parent for parent in path.absolute().parents if parent.exists()))


def _write_something(folder: Path) -> None:
    """OSError unless this folder takes a file."""
    with (
        _blamed_on(folder),
        tempfile.TemporaryFile(dir=folder) as file,  # which has no name that a kill could leave behind
    ):
        file.write(bytes(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock on a folder, where the system has such; nothing of it is in the folder."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())  # not one just removed
        except BlockingIOError:
            mine = False
        except OSError:  # a file system without locks
            mine = True
        if not mine:
            raise InputError(f"another process works in {folder}; wait for its end or give another folder")
        yield
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """A temporary file to write, which takes the place of `path` where the block ends without an error."""
    path = Path(path)
    with _blamed_on(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_left(path)
        handle, name = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
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
    """A temporary folder to fill, which takes the place of `folder` where the block ends without an error."""
    with _blamed_on(folder):
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
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if there is one, at once: a kill leaves it whole or hidden, never a part of it."""
    if folder.is_dir():
        clear_left(folder)
        aside = Path(tempfile.mkdtemp(prefix=_prefix(folder), dir=folder.parent))
        os.replace(folder, aside)
        shutil.rmtree(aside)


@contextmanager
def _blamed_on(path: Path) -> Iterator[None]:
    """An OSError about a temporary file, or none that it names, is about this path: the one that the user knows."""
    try:
        yield
    except OSError as error:
        named = Path(os.fsdecode(error.filename)).name if error.filename else _prefix(path)
        if error.errno and named.startswith((_prefix(path), "tmp")):
            error.filename = str(path)
        raise


def clear_left(path: Path) -> None:
    """Remove what processes of this machine left beside a file or folder when they were killed while writing it."""
    _clear_dead(path.parent, re.escape(path.name))


def _clear_dead(folder: Path, name: str = ".+") -> None:
    """Remove from a folder what dead processes of this machine left beside paths of this name, a pattern."""
    temporary = re.compile(rf"\.{name}\.{_machine()}-(\d+)\..*")
    for left in [*folder.iterdir()]:
        found = temporary.fullmatch(left.name)
        if found and not _is_alive(int(found[1])):
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


def read_csv(path: Path, name: str, wanted: str) -> pd.DataFrame:
    """The cells of a CSV file, as text, under the columns of its first line.

    name : as errors call it; wanted : what to give instead

    Raises InputError for what is no such file, and where a line has more cells than the first one.
    """
    import pandas as pd  # slow to import

    if not path.is_file():
        raise InputError(f"{name} does not exist; {wanted}")
    try:
        frame = pd.read_csv(path, dtype=str)
    except ValueError as error:  # also of text that is no UTF-8
        raise InputError(f"{name} is no CSV file ({str(error).strip()}); {wanted}") from None
    if not isinstance(frame.index, pd.RangeIndex):  # pandas takes the cells in front as names of the lines
        raise InputError(f"{name} has lines with more cells than its first one; {wanted}")
    return frame


def digest(*parts: Any, length: int = 16) -> str:
    """The first hex digits of the SHA-256 of these strings and bytes, one after another."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()[:length]


def nested_digest(*parts: Any) -> str:
    """A digest of the parts' digests, which depends on where one part ends and the next begins."""
    return digest(*(bytes.fromhex(digest(part, length=64)) for part in parts))


def unpacked_limit_bytes(path: Path) -> int:
    """What a compressed file may take unpacked; one that takes more is not what it should be."""
    return max(LEAST_LIMIT_BYTES, MOST_TIMES * path.stat().st_size)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
