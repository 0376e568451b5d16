"""Read traces at any path that fsspec knows, such as s3://bucket/trace."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specsim.io.errors import InputError
from specsim.io.examples import is_example
from specsim.trace.files import read_trace
from specsim.trace.meta import META, read_meta
from specsim.trace.packed import NAMES
from specsim.trace.trace import Trace

INSTALL = "pip install -c constraints.txt '.[dask]' brings fsspec; a kind of store may need a package of its own"


def read_trace_at(place: str) -> Trace:
    """Read the trace in a local folder, a packed file, or at a URL; raise InputError if it is not a trace."""
    with _local(place) as path:
        return read_trace(path)


def depth_at(place: str) -> int:
    """Read the depth of a trace, in tokens; for a folder, from meta.json alone."""
    if place.endswith(".zip") or is_example(place):
        return read_trace_at(place).depth
    with _local(place, (META,)) as path:
        return int(read_meta(path)["depth"])


@contextmanager
def _local(place: str, names: Sequence[str] = NAMES) -> Iterator[Path]:
    """Copy a trace at a URL to a temporary folder. names : files to copy of a folder"""
    if "://" not in place:
        yield Path(place)
        return
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder, place.rstrip("/").rpartition("/")[2])
        try:
            from fsspec.core import url_to_fs

            store, path = url_to_fs(place)
            if here.suffix == ".zip":
                store.get_file(path, str(here))
            else:
                here.mkdir()
                for name in names:
                    if store.isfile(f"{path}/{name}"):
                        store.get_file(f"{path}/{name}", str(here / name))
        except ImportError as error:
            raise InputError(f"trace {place}: {error}; {INSTALL}") from None
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(f"trace {place} cannot be fetched ({reason:.200}); check the address") from None
        try:
            yield here
        except InputError as error:
            raise InputError(str(error).replace(str(here), place)) from None
