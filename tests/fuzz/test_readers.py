"""Every reader refuses a bad file in a single line: past failures, and as many mutants as FUZZ_MUTANTS says.

`nox -s fuzz` tries 100,000 of each reader; mutants are the same in every run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specsim.acceptance.sources import read_rounds
from specsim.cost.model import ConstantCost
from specsim.engines.formats.registry import read_format
from specsim.io.errors import InputError
from specsim.io.parquet import INTEGER_LISTS, read_table
from specsim.trace.files import read_trace, write_trace
from tests.fuzz import outside
from tests.fuzz.reader import JSON, Reader
from tests.fuzz.readers import (
    BATCH_PROFILE,
    READERS,
    STEPS,
    sign_files,
    use_cost,
    write_packed,
    write_rounds,
    write_with_trees,
)
from tests.support import published
from tests.support.checks import refusal
from tests.support.reference import small_trace

SEED, MUTANTS = 19, int(os.environ.get("FUZZ_MUTANTS", "25"))  # of each reader
LIMIT_S, LIMIT_BYTES = 5, 2**31  # CPU time of a file, and address space of a reader
MOST_GROWTH_KB = 100_000  # of a reader's memory over all mutants
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
    failures, peak_kb = [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in [*range(MUTANTS), *CORPUS["mutants"].get(name, [])]:
        for file, content in unchanged.items():
            (path / file).write_bytes(content)
        what = outcome(reader, path, *mutant(name, valid, number), expected)
        failures += [f"{number}: {what}"] * (what not in ("refused", "accepted"))
    assert failures[:MAX_SHOWN] == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb < MOST_GROWTH_KB


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
    refusal(lambda: reader.read(path), "file.json")
    reader.write(path)
    for file in reader.files:
        valid = (path / file).read_bytes()
        for change in DAMAGE.values():
            if change(valid) != valid:
                (path / file).write_bytes(change(valid))
                refusal(lambda: reader.read(path), match=r"^[^\n]*file\.json[^\n]*$")
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
    refusal(lambda: reader.read(path), "in the format")


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
    refusal(lambda: read_rounds(tmp_path / "rounds.parquet"), match=says)


def test_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.parquet"
    broken = pa.StringArray.from_buffers(4, pa.py_buffer(np.arange(5, dtype=np.int32)), pa.py_buffer(b"ab\xffd"))
    rounds_with(path, lambda table: table.set_column(0, "policy", broken))
    refusal(lambda: read_rounds(path), "not a readable Parquet file")


def test_a_small_file_of_many_rows_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rounds.parquet"
    same = pa.repeat(pa.scalar(2, pa.int64()), 300_000)
    pq.write_table(pa.table({"drafted": same, "accepted": same, "t": same}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr("specsim.io.files.LEAST_LIMIT_BYTES", 2**22)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **how: pytest.fail("it was read"))
    refusal(lambda: read_rounds(path), "takes at least 6 MiB, at most 4 were expected")


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
    refusal(lambda: read_trace(path), "trace.zip is not a readable packed trace")


def test_what_is_wrong_inside_a_packed_trace_is_named_by_its_own_path(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    write_packed(path)
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist() if name != STEPS}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in files.items():
            new.writestr(name, content)
    refusal(lambda: read_trace(path), "trace.zip/steps.parquet is missing")


@pytest.mark.parametrize("ids", [0.5, 2.0, [2.5], "2", [True], {"a": 1}])
def test_end_of_text_tokens_are_whole_numbers(ids: Any, tmp_path: Path) -> None:
    write_with_trees(tmp_path / "trace")
    path = tmp_path / "trace" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    sign_files(tmp_path / "trace")
    refusal(lambda: read_trace(tmp_path / "trace"), "eos_token_id")


def request_with(**values: Any) -> bytes:
    request = {"request": 0, "id": "r", "prompt_tokens": [5], "max_output_tokens": 9, "temperature": 0.0}
    return json.dumps({**request, "forced_tokens": None, **values}).encode() + b"\n"


def rows_with(**values: Any) -> bytes:
    """Two rows of a request, of which the first has these values."""
    rows = np.array([(0, t, 7, (8, 3), (0.9, 0.4), (0.3, 1.2), (0.9, 0.5)) for t in (1, 2)], outside.ROW)
    for name, value in values.items():
        rows[name][0] = value
    content = io.BytesIO()
    np.save(content, rows)
    return content.getvalue()


def pickled(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


ENGINE, REQUESTS, DRAFTS = (f"vllm-dense, {name}" for name in ("engine.json", "requests.jsonl", "drafts.npy"))
PICKLE, STATED = "published, pickled", "published, specforge-eagle3, config.json"
IMPOSSIBLE = [
    *((ENGINE, json.dumps({**outside.FACTS, **values}).encode(), says) for values, says in (
        ({"vocabulary": 0}, "vocabulary"), ({"depth": 0}, "depth"), ({"depth": -1}, "depth"), ({"depth": 300}, "depth"),
        ({"depth": 4}, "of depth 4"), ({"vocabulary": 9}, "the vocabulary"),
    )),
    *((REQUESTS, 2 * request_with(**values), says) for values, says in (
        ({"prompt_tokens": []}, "prompt_tokens"), ({"prompt_tokens": [-1]}, "prompt_tokens"),
        ({"prompt_tokens": [2**40]}, "prompt_tokens"), ({"temperature": -3}, "temperature"),
    )),
    (REQUESTS, request_with(), "does not describe"),
    *((DRAFTS, rows_with(**values), says) for values, says in (
        ({"prob": (1.5, 0)}, r"prob leaves \[0, 1\]"), ({"prob": np.nan}, "prob leaves"),
        ({"entropy_nats": -1}, "entropy_nats leaves"), ({"top10_confidence": 2}, "top10_confidence leaves"),
        ({"token": -5}, "token leaves 0 to 96"), ({"token": 1000}, "token leaves"),
        ({"draft": 97}, "draft_token leaves"), ({"request": -1}, "does not describe"),
    )),
    (DRAFTS, b"\x93NUMPY\x01\x00\x46\x00" + b"{'descr': [], 'fortran_order': False, 'shape': (0,)}".ljust(70), "rows"),
    *((PICKLE, content, "no weights that are read") for content in (b"", b"hello", pickled([1]), pickled({1: 2}))),
    (STATED, b"\xff{}", "not valid JSON"),
    *((STATED, json.dumps({**published.layouts()["specforge-eagle3"]["config"], **values}).encode(), says)
      for values, says in (
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers 2147483647, its tensors allow 1 to 16"),
        ({"intermediate_size": 2**40}, "intermediate_size"), ({"head_dim": 4096}, "head_dim"),
        ({"hidden_act": 7}, "hidden_act"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), IMPOSSIBLE)
def test_impossible_values_are_refused_by_name(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    reader, path = READERS[name], tmp_path / "file"
    reader.write(path)
    (path / reader.files[0]).write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        reader.read(path)
    assert str(caught.value).isprintable()


def test_what_a_killed_server_left_of_a_last_line_is_dropped(tmp_path: Path) -> None:
    outside.write_dense(tmp_path / "part")
    described = tmp_path / "part" / "requests.jsonl"
    described.write_bytes(described.read_bytes()[:-9])
    assert read_format("vllm-dense", [tmp_path / "part"]).requests == 1


@pytest.mark.parametrize("column", ["prob", "confidence", "entropy_nats", "token", "draft_token"])
def test_a_trace_of_impossible_values_is_refused(column: str, tmp_path: Path) -> None:
    trace = small_trace()
    values = getattr(trace, column).copy()
    values[-1] = -5
    write_trace(replace(trace, **{column: values}), tmp_path / "trace")
    refusal(lambda: read_trace(tmp_path / "trace"), match=f"{column} leaves")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("head_count", 0, "cannot read"), ("embedding_length", 0, "embedding_length"),
        ("block_count", 10**6, "block_count"), ("feed_forward_length", 2**31, "feed_forward_length"),
        ("token_merges", ["a b", "a bc"], "cannot read"),
    ],
)  # fmt: skip
def test_a_gguf_file_of_impossible_sizes_is_refused(key: str, value: Any, says: str, tmp_path: Path) -> None:
    add, path = f"add_{key}", tmp_path / "model.gguf"
    own = getattr(gguf.GGUFWriter, add)
    with mock.patch.object(gguf.GGUFWriter, add, lambda writer, _: own(writer, value)):
        outside.write_gguf(path)
    with pytest.raises(InputError, match=says) as caught:
        outside.use_gguf(path)
    assert str(caught.value).isprintable() and str(path) in str(caught.value)


def test_a_profile_of_very_long_passes_takes_no_memory(tmp_path: Path) -> None:
    """Every K up to the longest pass was listed: 16 GiB."""
    path = tmp_path / "batches.json"
    path.write_text(json.dumps({**BATCH_PROFILE, "tokens": [1, 2**31 - 1]}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(InputError):
        use_cost(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
