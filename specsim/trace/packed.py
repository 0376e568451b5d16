"""Trace folders packed as a .zip file."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specsim.io.errors import InputError
from specsim.io.files import replacing, unpacked_limit_bytes
from specsim.trace.joined import MAX_DRAFTERS
from specsim.trace.meta import JOINED_FILE, META, SEQUENCES, STEPS, TREES

FOLDERS = (
    "",
    *(f"{number}/" for number in range(1, MAX_DRAFTERS + 1)),
)  # of the trace, and of the parts of a joined trace
NAMES = (JOINED_FILE, *(folder + name for folder in FOLDERS for name in (META, SEQUENCES, STEPS, TREES)))
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 1  # a member's flag


def pack_trace(folder: Path, path: Path) -> None:
    """Pack a trace folder into a .zip file, which `read_trace` also reads; raise InputError if it is not a trace."""
    names = [name for name in NAMES if (folder / name).is_file()]
    if not {META, JOINED_FILE}.intersection(names):
        raise InputError(f"{folder} is not a trace: it has neither {META} nor {JOINED_FILE}; give a trace folder")
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:  # Parquet is compressed already
        for name in names:
            archive.write(folder / name, name)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Unpack a trace into a temporary folder; InputError in the block names the .zip file."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                for member in _members(archive, unpacked_limit_bytes(path)):
                    target = Path(folder, member.filename)
                    target.parent.mkdir(exist_ok=True)
                    with archive.open(member) as packed, target.open("wb") as file:
                        shutil.copyfileobj(packed, file)
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"{path} is not a readable packed trace ({reason:.200}); pack it again") from None
        try:
            yield Path(folder)
        except InputError as error:
            raise InputError(str(error).replace(folder, str(path))) from None


def _members(archive: zipfile.ZipFile, limit_bytes: int) -> Sequence[zipfile.ZipInfo]:
    """List the trace's files in an archive; raise ValueError if they cannot be unpacked."""
    members = [member for member in archive.infolist() if member.filename in NAMES]
    if len({member.filename for member in members}) < len(members):
        raise ValueError("a file is in it twice")
    if any(member.flag_bits & ENCRYPTED for member in members):
        raise ValueError("it is encrypted")
    if any(member.compress_type not in METHODS for member in members):
        raise ValueError("it is compressed by another method than deflate")
    if sum(member.file_size for member in members) > limit_bytes:
        raise ValueError(f"unpacked, it would take more than {limit_bytes >> 20} MiB")
    return members
