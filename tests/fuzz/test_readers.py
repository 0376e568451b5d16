"""Every reader refuses a bad file in one line: past failures, and the first mutants of `nox -s fuzz`."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specsim.acceptance.sources import read_rounds
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.io.parquet import INTEGER_LISTS, read_table
from specsim.trace.files import read_trace
from tests.fuzz.__main__ import KEPT, mutant, outcome, prepared
from tests.fuzz.reader import JSON, Reader
from tests.fuzz.readers import READERS, STEPS, sign_files, write_packed, write_rounds, write_with_trees

SEED, FIRST = 19, 25  # of the mutants that are tried here
CORPUS: dict[str, Any] = json.loads(Path(__file__).with_name("corpus.json").read_text())
TEXTS = [*CORPUS["every JSON"], "[" * 100_000, '{"a":' * 100_000, "[" * 60 + "]" * 60, '{"s_d": %s}' % ("9" * 5000)]
WHOLE = [  # readers of one document a file, for which each of these is a bad one
    name
    for name, reader in READERS.items()
    if reader.family == JSON and name not in ("campaign stage", "prompts", "text rows", "drafter", "predictor")
]


def tried(reader: Reader, path: Path, file: str, content: bytes, wanted: Any = None) -> str:
    (path / file if file else path).write_bytes(content)
    if reader.mend:
        reader.mend(path)
    return outcome(reader, path, wanted)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_such_document_is_refused(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / "file.json"
    reader.write(path)
    kept = CORPUS.get(name, [])
    found = {
        text[:40]: tried(reader, path, reader.files[0], text.encode(errors="surrogatepass")) for text in [*TEXTS, *kept]
    }
    if name == "search journal":  # begun anew, as these may be what a kill left of its first line
        assert found.pop("") == found.pop("{") == "accepted"
    assert {text: what for text, what in found.items() if what != "refused"} == {}


@pytest.mark.parametrize("name", READERS)
def test_mutants_are_refused_in_one_line_or_read(name: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / ("file.zip" if "zipped" in name else "file.json")
    valid, wanted = prepared(reader, path)
    whole = (path / "meta.json").read_bytes() if reader.mend else b""
    bad = []
    for number in [*range(FIRST), *CORPUS["mutants"].get(name, [])]:
        for file, content in valid.items():
            (path / file if file else path).write_bytes(content)
        if reader.mend:
            (path / "meta.json").write_bytes(whole)
        found = tried(reader, path, *mutant(name, reader, valid, SEED, number), wanted)
        bad += [f"{number}: {found}"] * (found not in ("refused", "accepted"))
    assert bad[:KEPT] == []


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
        "'drafted' holds string, wanted whole numbers",
    ),
    "lists": (lambda table: table.set_column(3, "drafted", pa.array([[1]] * len(table))), "wanted whole numbers"),
    "nulls": (lambda table: table.set_column(3, "drafted", pa.array([1, 1, 1, None])), "'drafted' has nulls"),
    "flags": (lambda table: table.set_column(5, "tree", pa.array([0.5] * len(table))), "wanted true or false"),
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
    with pytest.raises(InputError, match="no readable Parquet file"):
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
    with pytest.raises(InputError, match="trace.zip is no readable packed trace"):
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
