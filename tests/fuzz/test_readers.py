"""Every reader refuses a bad file in a single line: past failures, and as many mutants as FUZZ_MUTANTS says.

`nox -s fuzz` tries 100,000 of each reader; mutants are the same in every run.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from specsim.acceptance.sources import read_rounds
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.io.parquet import INTEGER_LISTS, read_table
from specsim.trace.files import read_trace
from tests.fuzz.reader import JSON, Reader
from tests.fuzz.readers import READERS, STEPS, sign_files, write_packed, write_rounds, write_with_trees

SEED, MUTANTS = 19, int(os.environ.get("FUZZ_MUTANTS", "25"))  # of each reader
LIMIT_S, LIMIT_BYTES = 5, 2**31  # CPU time of a file, and memory of a reader
MAX_CHARACTERS = 1000  # of an error
MAX_SHOWN = 5  # failures of a reader
CORPUS: dict[str, Any] = json.loads(Path(__file__).with_name("corpus.json").read_text())
TEXTS = [*CORPUS["every JSON"], "[" * 100_000, '{"a":' * 100_000, "[" * 60 + "]" * 60, '{"s_d": %s}' % ("9" * 5000)]
WHOLE = [  # readers of a document a file, which refuse each of these
    name
    for name, reader in READERS.items()
    if reader.family == JSON and name not in ("GPU stage", "prompts", "text rows", "drafter", "predictor")
]


def mutant(name: str, valid: dict[str, bytes], number: int) -> tuple[str, bytes]:
    """Return the changed file's name and content."""
    reader, rng = READERS[name], Random(f"{SEED} {name} {number}")
    file = reader.files[number % len(reader.files)]
    return file, reader.mutate(valid[file], rng)


def outcome(reader: Reader, path: Path, file: str, content: bytes, expected: Any = None) -> str:
    """Return "refused", "accepted", or what is wrong, after writing this content. expected : of the valid file"""
    (path / file).write_bytes(content)
    if reader.mend:
        reader.mend(path)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        document = reader.read(path)
    except InputError as error:
        message = str(error)
        if not message.isprintable() or len(message) > MAX_CHARACTERS:
            return f"an unreadable error: {message!r:.200}"
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.200}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted" if not reader.covered or document == expected else "accepted, but it reads differently"


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    """Limit memory, and the CPU time that a file takes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, memory[1]))
    handler = signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"a file takes over {LIMIT_S} s"))
    yield
    signal.signal(signal.SIGPROF, handler)
    resource.setrlimit(resource.RLIMIT_AS, memory)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_such_document_is_refused(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / "file.json"
    reader.write(path)
    texts = [*TEXTS, *CORPUS.get(name, [])]
    outcomes = {
        text[:40]: outcome(reader, path, reader.files[0], text.encode(errors="surrogatepass")) for text in texts
    }
    assert {text: what for text, what in outcomes.items() if what != "refused"} == {}


@pytest.mark.parametrize("name", READERS)
def test_mutants_are_refused_in_one_line_or_read(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / ("file.zip" if "zipped" in name else "file.json")
    reader.write(path)
    expected = reader.read(path)
    valid = {file: (path / file).read_bytes() for file in reader.files}
    unchanged = {**valid, "meta.json": (path / "meta.json").read_bytes()} if reader.mend else valid
    failures = []
    for number in [*range(MUTANTS), *CORPUS["mutants"].get(name, [])]:
        for file, content in unchanged.items():
            (path / file).write_bytes(content)
        what = outcome(reader, path, *mutant(name, valid, number), expected)
        failures += [f"{number}: {what}"] * (what not in ("refused", "accepted"))
    assert failures[:MAX_SHOWN] == []


def other_version(content: bytes) -> bytes:
    for name in (b'"version": ', b'"schema_version": '):
        content = content.replace(name, name + b"9")
    return content


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "a flipped byte": lambda content: bytes([content[0] ^ 0x80]) + content[1:],
    "no text": lambda content: b"\xff\xfe\x00" + content,
    "another kind": lambda content: b'{"kind": 7}',
    "another version": other_version,
}
DAMAGED = [
    "trace meta", "trace folder", "cost profile", "constant costs", "cost grid", "drafter",
    "predictor", "acceptance by position",
]  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_missing_file_is_refused(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / "file.json"
    with pytest.raises(InputError, match=r"file\.json"):
        reader.read(path)
    reader.write(path)
    for file in reader.files:
        valid = (path / file).read_bytes()
        for change in DAMAGE.values():
            if change(valid) != valid:
                (path / file).write_bytes(change(valid))
                with pytest.raises(InputError, match=r"^[^\n]*file\.json[^\n]*$"):
                    reader.read(path)
        (path / file).write_bytes(valid)


@pytest.mark.parametrize("name", ["drafter", "predictor"])
def test_weights_of_another_format_are_refused(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / "file.json"
    reader.write(path)
    (file,) = reader.files
    with safe_open(path / file, framework="pt") as handle:
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        metadata = dict(handle.metadata())
    save_file(tensors, path / file, metadata={**metadata, "format": "another 9"})
    with pytest.raises(InputError, match="in the format"):
        reader.read(path)


def test_seconds_that_overflow_or_vanish_are_refused() -> None:
    for s_d, s_t in ((1e-320, 1.0), (1.0, 1e300), (float("nan"), 1.0), (1.0, float("inf"))):
        with pytest.raises(InputError, match="not positive and finite"):
            ConstantCost(s_d, s_t)


def rounds_with(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    write_rounds(path)
    pq.write_table(change(pq.ParquetFile(path).read()), path)


TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "a column twice": (lambda table: table.append_column("drafted", table.column("drafted")), "'drafted' twice"),
    "text": (
        lambda table: table.set_column(3, "drafted", pa.array(["1"] * len(table))),
        "'drafted' holds string, expected whole numbers",
    ),
    "lists": (lambda table: table.set_column(3, "drafted", pa.array([[1]] * len(table))), "expected whole numbers"),
    "nulls": (lambda table: table.set_column(3, "drafted", pa.array([1, 1, 1, None])), "'drafted' has nulls"),
    "flags": (lambda table: table.set_column(5, "tree", pa.array([0.5] * len(table))), "expected true or false"),
    "a column beyond 63 bits": (
        lambda table: table.set_column(3, "drafted", pa.array([2**64 - 1] * len(table), pa.uint64())),
        "'drafted' has a number above",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_another_schema_is_refused(name: str, tmp_path: Path) -> None:
    change, says = TABLES[name]
    rounds_with(tmp_path / "rounds.parquet", change)
    with pytest.raises(InputError, match=says):
        read_rounds(tmp_path / "rounds.parquet")


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    broken = pa.StringArray.from_buffers(4, pa.py_buffer(np.arange(5, dtype=np.int32)), pa.py_buffer(b"ab\xffd"))
    rounds_with(path, lambda table: table.set_column(0, "policy", broken))
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_rounds(path)


def test_a_small_file_of_many_rows_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rounds.parquet"
    same = pa.repeat(pa.scalar(2, pa.int64()), 300_000)
    pq.write_table(pa.table({"drafted": same, "accepted": same, "t": same}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr("specsim.io.files.LEAST_LIMIT_BYTES", 2**22)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **how: pytest.fail("it was read"))
    with pytest.raises(InputError, match="takes at least 6 MiB, at most 4 were expected"):
        read_rounds(path)


def test_a_small_file_of_long_lists_is_refused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, columns = tmp_path / "lists.parquet", {"lists": INTEGER_LISTS}
    lists = pa.array([[7] * 100] * 30_000, pa.list_(pa.int64()))
    pq.write_table(pa.table({"lists": lists}), path, compression="zstd")
    assert len(read_table(path, columns, invalid="record it again")) == 30_000
    monkeypatch.setattr("specsim.io.files.LEAST_LIMIT_BYTES", 2**22)
    with pytest.raises(InputError, match="takes at least 12 MiB, at most 4 were expected"):
        read_table(path, columns, invalid="record it again")


def repacked(path: Path, method: int) -> None:
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", method) as new:
        for name, content in files.items():
            new.writestr(name, content)


def flagged(path: Path, at: int, value: int) -> None:
    """Another value in the header and the directory entry of every member; `at` : in the header."""
    data = bytearray(path.read_bytes())
    for mark, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        place = -1
        while (place := data.find(mark, place + 1)) >= 0:
            data[place + at + shift] = value
    path.write_bytes(bytes(data))


def with_broken_streams(path: Path) -> None:
    repacked(path, zipfile.ZIP_DEFLATED)
    data = bytearray(path.read_bytes())
    data[60:90] = b"\xff" * 30
    path.write_bytes(bytes(data))


PACKED: dict[str, Callable[[Path], object]] = {
    "LZMA": lambda path: repacked(path, zipfile.ZIP_LZMA),
    "an unknown method": lambda path: flagged(path, 8, 77),
    "encryption": lambda path: flagged(path, 6, 1),
    "a later version": lambda path: flagged(path, 4, 99),
    "broken streams": with_broken_streams,
}


@pytest.mark.parametrize("name", PACKED)
def test_a_trace_that_cannot_be_unpacked_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    write_packed(path)
    PACKED[name](path)
    with pytest.raises(InputError, match="trace.zip is not a readable packed trace"):
        read_trace(path)


def test_what_is_wrong_inside_a_packed_trace_is_named_by_its_own_path(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    write_packed(path)
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist() if name != STEPS}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in files.items():
            new.writestr(name, content)
    with pytest.raises(InputError, match="trace.zip/steps.parquet is missing"):
        read_trace(path)


@pytest.mark.parametrize("ids", [0.5, 2.0, [2.5], "2", [True], {"a": 1}])
def test_end_of_text_tokens_are_whole_numbers(ids: Any, tmp_path: Path) -> None:
    write_with_trees(tmp_path / "trace")
    path = tmp_path / "trace" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    sign_files(tmp_path / "trace")
    with pytest.raises(InputError, match="eos_token_id"):
        read_trace(tmp_path / "trace")
