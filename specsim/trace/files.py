"""Trace folders: `meta.json`, `sequences.parquet`, `steps.parquet` and, with trees, `trees.parquet`.

The folder of a joined trace has such a folder for each drafter, named 1, 2 and so on, and `joined.json`. A folder may
be packed as a .zip file, and stand at any path that fsspec knows, such as s3://bucket/trace.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pyarrow as pa

from specsim.io.arrays import Array, IntArray
from specsim.io.errors import InputError
from specsim.io.examples import PREFIX, example_files, is_example, located
from specsim.io.files import (
    digest,
    file_digest,
    replacing,
    replacing_folder,
    unpacked_limit_bytes,
    write_json,
    write_table,
)
from specsim.io.json import checked, read_json
from specsim.io.parquet import FLOAT_LISTS, FLOATS, INTEGER_LISTS, INTEGERS, TEXT, read_table
from specsim.trace.joined import MAX_DRAFTERS, JoinedTrace
from specsim.trace.joined import join_traces as join
from specsim.trace.trace import MAX_DEPTH, NO_TOKEN, OPTIONAL_LISTS, STEP_LISTS, Trace
from specsim.trace.tree_record import MAX_NODES, TreeRecord, record_from_nodes

SCHEMA_VERSION = 3
META = "meta.json"
SEQUENCES = "sequences.parquet"
STEPS = "steps.parquet"
TREES = "trees.parquet"
JOINED_FILE = "joined.json"  # beside a folder for each trace: 1, 2 and so on
AGAIN = "restore or record it again"
FOLDERS = (
    "",
    *(f"{number}/" for number in range(1, MAX_DRAFTERS + 1)),
)  # of the trace, and of the parts of a joined trace
NAMES = (JOINED_FILE, *(folder + name for folder in FOLDERS for name in (META, SEQUENCES, STEPS, TREES)))
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED = 1  # a member's flag
PROMPT = "prompt"  # column of the sequences
MOST_TOKENS = 2**31 - 1  # of a sequence, and its number, at most
LIMITS = {  # of a column's values
    "prob": 1, "confidence": 1, "top10_confidence": 1, "entropy_nats": np.inf, "text_prob": 1, "text_accept": 1,
}  # fmt: skip
ROUNDING = 1e-5  # of engines' statistics in float32
STEP_COLUMNS = {"token": np.int32, "match_len": np.uint8, "sequence_id": np.int64, "t": np.int64}
TREE_COLUMNS = {"parent": INTEGER_LISTS, "token": INTEGER_LISTS, "prob": FLOAT_LISTS}
JUDGED_COLUMNS = ("target_prob", "target_entropy_nats")  # of nodes, where recorded for typical acceptance
JOINED_KIND = "specsim-joined-trace"
JOIN_AGAIN = "join the traces again"
INSTALL = "pip install -c constraints.txt '.[dask]' brings fsspec; a kind of store may need a package of its own"
TraceLike = Trace | str | PathLike[str]  # as every function takes a trace


class JoinedFile(TypedDict):
    """Schema of joined.json: the number of traces in the folder of a joined trace."""

    kind: Literal["specsim-joined-trace"]
    version: Literal[1]
    parts: int


def write_trace(trace: Trace | str | PathLike[str], folder: str | PathLike[str], *, overwrite: bool = False) -> None:
    """Write a trace folder, whole or not at all.

    Parameters
    ----------
    trace : Trace, str or Path
        N positions in S sequences, or where they are, as `read_trace` takes it.
    folder : str or Path
        Folder to write: `meta.json` and tables of sequences, positions and, where recorded, trees; for a joined
        trace, a folder for each drafter.
    overwrite : bool
        Replace an existing trace.

    Raises
    ------
    InputError
        If the folder exists and must not be replaced, or cannot be.

    References
    ----------
    Apache Parquet, https://parquet.apache.org/docs/file-format/ (the tables; their columns are those of `Trace`).

    Examples
    --------
    >>> import pathlib, tempfile, specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=4, output_tokens=30, depth=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     specsim.write_trace(trace, pathlib.Path(folder, "trace"))
    ...     specsim.read_trace(pathlib.Path(folder, "trace")).output_tokens.tolist()
    [30, 30, 30, 30]
    """
    folder, trace = Path(folder), as_trace(trace)
    check_free(folder, overwrite=overwrite)
    if trace.tree is not None and trace.tree.plausible is not None:
        raise InputError(
            "files hold no trace under typical acceptance; write the recording, and accept when reading it"
        )
    with replacing_folder(folder) as work:
        if not isinstance(trace, JoinedTrace):
            _write(trace, work)
            return
        for number, part in enumerate(trace.parts, start=1):
            (work / str(number)).mkdir()
            _write(part, work / str(number))
        write_json({"kind": JOINED_KIND, "version": 1, "parts": len(trace.parts)}, work / JOINED_FILE)


def _write(trace: Trace, work: Path) -> None:
    write_table(_sequence_table(trace), work / SEQUENCES)
    write_table(_step_table(trace), work / STEPS)
    meta = {**trace.meta, "schema_version": SCHEMA_VERSION, "depth": trace.depth}
    files = [SEQUENCES, STEPS]
    if trace.tree is not None:
        write_table(_tree_table(trace, trace.tree), work / TREES)
        meta["tree"] = {"nodes": trace.tree.nodes, "width": trace.tree.width}
        files.append(TREES)
    meta["checksums"] = {name: file_digest(work / name) for name in files}
    meta["checksums"][META] = meta_digest(meta)
    (work / META).write_text(json.dumps(meta, indent=2) + "\n")


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Raise InputError unless a trace may be written here."""
    if folder.exists() and not overwrite:
        raise InputError(f"{folder} exists; choose another name or overwrite it (--overwrite)")
    if folder.exists() and not any((folder / name).is_file() for name in (META, JOINED_FILE)):
        raise InputError(f"{folder} is not a trace and will not be overwritten; choose another name")


def read_trace(folder: str | PathLike[str]) -> Trace:
    """Read and check a recorded trace.

    Parameters
    ----------
    folder : str or Path
        A folder written by `realrun record`, `specsim join` or `write_trace`, packed as .zip or not, or the name of an
        example, such as "example:lab-eagle"; `specsim example --list` shows them.

    Returns
    -------
    Trace
        N positions in S sequences, [N] and [S] arrays; see there.

    Raises
    ------
    InputError
        If the folder is not a trace; the message says what is wrong with it.

    References
    ----------
    As of `write_trace`.

    Examples
    --------
    >>> import pathlib, tempfile, specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=4, output_tokens=30, depth=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     specsim.write_trace(trace, pathlib.Path(folder, "trace"))
    ...     specsim.read_trace(pathlib.Path(folder, "trace")).output_tokens.tolist()
    [30, 30, 30, 30]
    >>> specsim.read_trace("example:lab-eagle").meta["drafter"]
    'lab/eagle'
    """
    if not isinstance(folder, str | PathLike):
        raise _not_a_trace(folder)
    folder = located(folder, "trace")
    if folder.suffix == ".zip" and folder.is_file():
        with unpacked(folder) as there:
            return read_trace(there)
    index = folder / JOINED_FILE
    if index.is_file():
        joined: JoinedFile = read_json(index, str(index), JoinedFile, missing=JOIN_AGAIN, invalid=JOIN_AGAIN)
        if not 2 <= joined["parts"] <= MAX_DRAFTERS:
            raise InputError(f"{index}: parts={joined['parts']}, not 2 to {MAX_DRAFTERS}; {JOIN_AGAIN}")
        parts = [folder / str(number) for number in range(1, joined["parts"] + 1)]
        return join({str(part): read_trace(part) for part in parts})
    return _read_folder(folder)


def _read_folder(folder: Path) -> Trace:
    meta = read_meta(folder)
    for name, expected in meta["checksums"].items():
        if name == META:
            continue
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path} is missing; copy the whole trace folder or record it again")
        if file_digest(path) != expected:
            raise InputError(f"{path} is truncated or altered (checksum differs); restore or record it again")
    values: dict[str, Any] = {"meta": meta, **_read_sequences(folder / SEQUENCES), **_read_steps(folder / STEPS, meta)}
    lengths = values.pop("output_tokens")
    rows = values.pop("sequence_id of rows"), values.pop("t")
    if not lengths.sum():
        raise InputError(f"{folder} has no output tokens; record it again with output")
    if lengths.sum() != len(values["token"]):
        raise InputError(f"{folder / STEPS} does not have the rows that {SEQUENCES} counts; record it again")
    values["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if TREES in meta["checksums"]:
        values["tree"] = _read_trees(folder / TREES, meta, rows)
    pa.default_memory_pool().release_unused()  # else it keeps its buffers, larger than the trace, for other tables
    trace = Trace(**values)
    _check(trace, folder, *rows)
    return trace


def as_trace(trace: object) -> Trace:
    """Return a trace, or read it from a folder or an example's name; raise TypeError for anything else."""
    if isinstance(trace, Trace):
        return trace
    if isinstance(trace, str | PathLike):
        return read_trace(trace)
    raise _not_a_trace(trace)


def _not_a_trace(trace: object) -> TypeError:
    return TypeError(
        f"trace is a {type(trace).__name__}; expected a Trace, its folder, or a name such as 'example:lab-model' (see "
        "specsim.read_trace; specsim.generate makes synthetic ones)"
    )


def read_plain_trace(trace: object) -> Trace:
    """Return or read a trace of a single drafter; raise InputError for a joined trace."""
    plain = as_trace(trace)
    if isinstance(plain, JoinedTrace):
        joined, part = ("this", "its parts[0]") if isinstance(trace, Trace) else (trace, f"{trace}/1")
        raise InputError(
            f"{joined} is a joined trace of {len(plain.parts)} drafters; give a single part, such as {part}"
        )
    return plain


def _read_sequences(path: Path) -> dict[str, Array]:
    numbers = ("sequence_id", "prompt_tokens", "budget_tokens", "output_tokens")
    columns = dict.fromkeys(numbers, INTEGERS) | {"domain": TEXT, "source": TEXT, PROMPT: INTEGER_LISTS}
    table = read_table(path, columns, ("source", PROMPT), invalid=AGAIN)  # optional: a synthetic trace has no prompts
    values: dict[str, Array] = {name: _column(table, name, np.int64, path) for name in numbers}
    for name in numbers:
        least = 0 if name in ("sequence_id", "output_tokens") else 1
        if not ((values[name] >= least) & (values[name] <= MOST_TOKENS)).all():
            raise InputError(f"{path}: column {name!r} has a value outside {least} to {MOST_TOKENS}; {AGAIN}")
    for name in [name for name in ("domain", "source") if name in table.column_names]:
        values[name] = np.array(table.column(name).to_pylist(), dtype=np.str_)
    if PROMPT in table.column_names:
        values[PROMPT] = _prompts(table, values["prompt_tokens"], path)
    return values


def _prompts(table: pa.Table, lengths: Array, path: Path) -> Array:
    column = table.column(PROMPT).combine_chunks()
    if not pa.types.is_list(column.type) or not np.array_equal(np.diff(np.from_dlpack(column.offsets)), lengths):
        raise InputError(f"{path}: column {PROMPT!r} does not hold the tokens of every prompt; {AGAIN}")
    tokens = _as_numpy(column.values, PROMPT, np.int32, path)
    if (tokens < 0).any():
        raise InputError(f"{path}: column {PROMPT!r} has negative token ids; {AGAIN}")
    return tokens


def _read_steps(path: Path, meta: dict[str, Any]) -> dict[str, Array]:
    """Read the columns of a trace, and the sequence and position of each row as "sequence_id of rows" and "t"."""
    lists = {**STEP_LISTS, **OPTIONAL_LISTS}
    kinds = {name: FLOAT_LISTS if np.issubdtype(dtype, np.floating) else INTEGER_LISTS for name, dtype in lists.items()}
    kinds = dict.fromkeys(STEP_COLUMNS, INTEGERS) | kinds
    values: dict[str, Array] = {}
    for name, kind in kinds.items():  # all at once would take three times the memory of the trace
        table = read_table(path, {name: kind}, OPTIONAL_LISTS, invalid=AGAIN)
        if name in STEP_COLUMNS:
            values[name] = _column(table, name, STEP_COLUMNS[name], path)
        elif name in table.column_names:
            values[name] = _list_column(table, name, lists[name], meta["depth"], path)
        del table
        pa.default_memory_pool().release_unused()
    if len({len(column) for column in values.values()}) > 1:
        raise InputError(f"{path}: columns differ in length; {AGAIN}")
    values["sequence_id of rows"] = values.pop("sequence_id")
    return values


def _column(table: pa.Table, name: str, dtype: Any, path: Path) -> Array:
    return _as_numpy(table.column(name).combine_chunks(), name, dtype, path)


def _as_numpy(column: Any, name: str, dtype: Any, path: Path) -> Array:
    """Return a writable copy, because the replay kernel would be compiled again for read-only arrays."""
    wanted = pa.from_numpy_dtype(dtype)
    values = np.from_dlpack(column)  # `to_numpy` would import pandas
    if np.can_cast(values.dtype, dtype):  # what pyarrow casts, it imports a module of its own for
        return values.astype(dtype)
    try:
        return np.array(np.from_dlpack(column.cast(wanted)))
    except pa.ArrowInvalid:
        raise InputError(f"{path}: column {name!r} holds values that do not fit {wanted}; {AGAIN}") from None


def _list_column(table: pa.Table, name: str, dtype: Any, depth: int, path: Path) -> Array:
    column = table.column(name).combine_chunks()
    if not pa.types.is_fixed_size_list(column.type) or column.type.list_size != depth:
        raise InputError(f"{path}: column {name!r} is {column.type}, expected lists of {depth}; record it again")
    values = _as_numpy(column.values, name, dtype, path).reshape(len(table), depth)
    if np.issubdtype(dtype, np.floating) and not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0, 0])
        raise InputError(f"{path}: column {name!r} is not finite at row {row}; {AGAIN}")
    return values


def _check(trace: Trace, folder: Path, step_sequence_id: IntArray, step_t: IntArray) -> None:
    expected = np.repeat(trace.sequence_id, trace.output_tokens), trace.position
    if not all(map(np.array_equal, (step_sequence_id, step_t), expected)):
        raise InputError(f"{folder / STEPS} does not have the rows that {SEQUENCES} counts; record it again")
    if (trace.output_tokens > trace.budget_tokens).any():
        raise InputError(f"{folder / SEQUENCES}: an output is longer than its budget; record it again")
    if trace.match_len.max() > trace.depth:
        raise InputError(f"{folder / STEPS}: match_len exceeds the depth {trace.depth}; record it again")
    proposed = trace.draft_token != NO_TOKEN
    if (proposed[:, 1:] & ~proposed[:, :-1]).any() or (trace.match_len > proposed.sum(axis=1)).any():
        raise InputError(f"{folder / STEPS}: draft_token has a gap, or match_len goes beyond it; record it again")
    check_values(trace, str(folder / STEPS), "record it again")


def check_values(trace: Trace, name: str, advice: str) -> None:
    """Raise InputError for an impossible token, probability or entropy of a trace, which errors call `name`."""
    drafted = trace.draft_token != NO_TOKEN  # beyond what a drafter proposes, the other columns mean nothing
    size = (trace.meta.get("vocabulary") or {}).get("tokens", MOST_TOKENS + 1)
    tokens = {"token": trace.token, "draft_token": trace.draft_token[drafted]}
    for column, values in tokens.items() if trace.token.size else ():
        if not ((values >= 0) & (values < size)).all():
            raise InputError(f"{name}: {column} leaves 0 to {size - 1}, the vocabulary; {advice}")
    for column, most in LIMITS.items():
        values = getattr(trace, column)
        if values is None:
            continue
        values = values if column.startswith("text_") else values[drafted]
        if not ((values >= -ROUNDING) & (values <= most + ROUNDING)).all():
            raise InputError(f"{name}: {column} leaves [0, {most}]; {advice}")


def _read_trees(path: Path, meta: dict[str, Any], rows: tuple[IntArray, IntArray]) -> TreeRecord:
    """Read the recorded trees; `rows` are sequence id and t of every position."""
    most, width = tree_limits(meta)
    columns = {"sequence_id": INTEGERS, "t": INTEGERS, "horizon": FLOATS, **TREE_COLUMNS}
    columns |= dict.fromkeys(JUDGED_COLUMNS, FLOAT_LISTS)
    table = read_table(path, columns, JUDGED_COLUMNS, invalid=AGAIN)
    own = [_column(table, name, np.int64, path) for name in ("sequence_id", "t")]
    if not all(map(np.array_equal, own, rows)):
        raise InputError(f"{path} does not have the rows of {STEPS}; record it again")
    nodes: dict[str, Array] = {}
    counts: IntArray | None = None
    judged = [(name, np.float32, 0.0) for name in JUDGED_COLUMNS if name in table.column_names]
    for name, dtype, absent in (("parent", np.int16, -1), ("token", np.int32, -1), ("prob", np.float32, 0.0), *judged):
        if not pa.types.is_list(table.column(name).type):
            raise InputError(f"{path}: column {name!r} holds lists of a fixed length; record it again")
        column = table.column(name).combine_chunks()
        lengths = np.diff(np.from_dlpack(column.offsets))  # value_lengths() would import pyarrow.compute
        counts = lengths if counts is None else counts
        if not np.array_equal(lengths, counts):
            raise InputError(f"{path}: columns 'parent' and {name!r} differ in length; record it again")
        if counts.max() > most:
            raise InputError(f"{path}: a tree has {counts.max()} nodes, more than {most}; record it again")
        nodes[name] = np.full((len(counts), most), absent, dtype=dtype)
        nodes[name][np.arange(most) < counts[:, None]] = _as_numpy(column.flatten(), name, dtype, path)
    assert counts is not None
    if not np.array_equal((nodes["parent"] >= 0).sum(axis=1), counts):
        raise InputError(f"{path}: column 'parent' has a negative value; record it again")
    horizon = _column(table, "horizon", np.float32, path)
    for name, values in (
        *((name, nodes[name]) for name in ("prob", *JUDGED_COLUMNS) if name in nodes),
        ("horizon", horizon),
    ):
        most_value = np.inf if name == "target_entropy_nats" else 1
        if not ((values >= 0) & (values <= most_value)).all():
            raise InputError(f"{path}: column {name!r} leaves [0, {most_value}]; record it again")
    try:
        return record_from_nodes(**nodes, horizon=horizon, width=width)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _tree_table(trace: Trace, tree: TreeRecord) -> pa.Table:
    here = tree.parent >= 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(here.sum(axis=1))]).astype(np.int32))
    columns = {
        "parent": tree.parent,
        "depth": tree.depth,
        "rank": tree.rank,
        "token": tree.token,
        "prob": tree.prob,
        "on_path": tree.on_path(trace.token, trace.offsets),
    }
    columns |= {name: values for name in JUDGED_COLUMNS if (values := getattr(tree, name)) is not None}
    return pa.table(
        {
            "sequence_id": pa.array(np.repeat(trace.sequence_id, trace.output_tokens), pa.int32()),
            "t": pa.array(trace.position, pa.int32()),
            "horizon": pa.array(tree.horizon, pa.float32()),
            **{name: pa.ListArray.from_arrays(offsets, pa.array(values[here])) for name, values in columns.items()},
        }
    )


def _sequence_table(trace: Trace) -> pa.Table:
    columns = {
        "sequence_id": pa.array(trace.sequence_id, pa.int32()),
        "domain": pa.array(trace.domain.tolist(), pa.string()),
        "prompt_tokens": pa.array(trace.prompt_tokens, pa.int32()),
        "budget_tokens": pa.array(trace.budget_tokens, pa.int32()),
        "output_tokens": pa.array(trace.output_tokens, pa.int32()),
    }
    if trace.source is not None:
        columns["source"] = pa.array(trace.source.tolist(), pa.string())
    if trace.prompt is not None:
        offsets = pa.array(np.concatenate([[0], np.cumsum(trace.prompt_tokens)]).astype(np.int32))
        columns[PROMPT] = pa.ListArray.from_arrays(offsets, pa.array(trace.prompt, pa.int32()))
    return pa.table(columns)


def _step_table(trace: Trace) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "sequence_id": pa.array(np.repeat(trace.sequence_id, trace.output_tokens), pa.int32()),
        "t": pa.array(trace.position, pa.int32()),
        "token": pa.array(trace.token, pa.int32()),
        "match_len": pa.array(trace.match_len, pa.uint8()),
    }
    for name, dtype in {**STEP_LISTS, **OPTIONAL_LISTS}.items():
        values = getattr(trace, name)
        if values is not None:
            flat = pa.array(np.ascontiguousarray(values, dtype=dtype).ravel())
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, trace.depth)
    return pa.table(columns)


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


def join_traces(traces: Mapping[str, TraceLike]) -> JoinedTrace:
    """Join traces of the same target and outputs, each with a different drafter.

    Recorded trees are dropped, and all drafts are cut to the depth of the shallowest trace. A trace made from texts
    (`specsim record-text`) names neither its target nor its decoding, and takes both from the others.

    Parameters
    ----------
    traces : mapping
        Two or three traces, or their paths as `read_trace` takes them, by the names to use in errors; their order is
        the order of the drafters.

    Returns
    -------
    JoinedTrace

    Raises
    ------
    InputError
        If target, decoding, prompts, outputs, limits or end tokens differ; also for outputs of rejection sampling,
        which depend on the drafter, for SPACE, and for a trace without text.

    Examples
    --------
    >>> import specsim
    >>> joined = specsim.join_traces({"lookup": "example:lab-lookup", "EAGLE": "example:lab-eagle"})
    >>> [part.meta["drafter"] for part in joined.parts]
    ['prompt-lookup', 'lab/eagle']
    """
    if not isinstance(traces, Mapping):
        raise TypeError(
            f"traces is a {type(traces).__name__}; expected a mapping of two or three traces by name, such as "
            "{'lookup': 'lookup/', 'eagle': 'eagle/'}"
        )
    return join({name: as_trace(trace) for name, trace in traces.items()})


class Decoding(TypedDict):
    """How the output was decoded; other keys are the sampler's."""

    mode: str
    temperature: NotRequired[float]
    top_p: NotRequired[float]
    top_k: NotRequired[int]
    seed: NotRequired[int]


class Trees(TypedDict):
    """Most nodes recorded per position, and most children per node."""

    nodes: int
    width: int


class Prompts(TypedDict):
    """Where the prompts come from."""

    source: str
    count: int
    digest: str


class Seconds(TypedDict):
    """Seconds that recording took."""

    generate: float
    dense: float


class Provenance(TypedDict):
    """Where and when the trace was recorded."""

    device: str
    date: str


class EngineFacts(TypedDict):
    """The inference engine that recorded the trace, and how it ran.

    max_num_batched_tokens, max_num_seqs : tokens and sequences of a step, at most; longer prompts are read in chunks
    first_position_drafted : whether it drafts ahead of an output's first token. If not, the first row of every sequence
        has no draft: NO_TOKEN and match length 0
    """

    name: str
    version: str
    runner: str
    max_num_batched_tokens: int
    max_num_seqs: int
    first_position_drafted: bool


class Synthetic(TypedDict):
    """The acceptance model of a synthetic trace."""

    model: str
    informed: NotRequired[bool]


class Vocabulary(TypedDict):
    """Tokens that the target can emit."""

    tokens: int


class Meta(TypedDict):
    """Schema of meta.json; unknown keys are allowed.

    recurrent_layers : which of "target" and "drafter" have recurrent layers, which can neither draft nor verify trees
    second_pass : whether a round that rejects tokens ends with a second target pass, over the pending and the accepted
        tokens, which restores the recurrent states
    """

    schema_version: Literal[3]
    target: str
    drafter: str
    decoding: str | Decoding
    depth: int
    eos_token_id: int | list[int] | None
    dtype: str
    device: str
    checksums: dict[str, str]
    drafter_kind: NotRequired[str]
    drafter_facts: NotRequired[dict[str, Any]]
    weights: NotRequired[str | None]
    predictor: NotRequired[str | None]
    tree: NotRequired[Trees | None]
    prompts: NotRequired[str | Prompts | None]
    max_new_tokens: NotRequired[int]
    kernels: NotRequired[str]
    distinct_trigram_share: NotRequired[float]
    first_token_accepted_share: NotRequired[float]
    record_seconds: NotRequired[Seconds]
    provenance: NotRequired[Provenance]
    engine: NotRequired[EngineFacts]
    synthetic: NotRequired[Synthetic]
    informed: NotRequired[bool]
    text: NotRequired[bool]
    vocabulary: NotRequired[Vocabulary | None]
    recurrent_layers: NotRequired[list[str]]
    second_pass: NotRequired[bool]


def read_meta(folder: Path) -> dict[str, Any]:
    """Read and check the meta.json of a trace folder; raise InputError if it is invalid."""
    path = folder / META
    if not path.is_file():
        wrong = f"is not a trace: {META} is missing" if folder.exists() else "does not exist"
        example = f"{PREFIX}{folder}"
        name = example if example in example_files("trace") else "a name of `specsim example --list`"
        raise InputError(f"{folder} {wrong}; give a folder made by `realrun record`, or {name}")
    meta = read_json(path, str(path), dict[str, Any], missing=AGAIN, invalid=AGAIN)
    version = meta.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; record it again")
    checked(meta, str(path), Meta, invalid=AGAIN)
    if not 1 <= meta["depth"] <= MAX_DEPTH:
        raise InputError(f"{path}: depth {meta['depth']} is not from 1 to {MAX_DEPTH}; record it again")
    checksums = set(meta["checksums"])
    if not {SEQUENCES, STEPS} <= checksums <= {META, SEQUENCES, STEPS, TREES}:
        raise InputError(f"{path}: checksums must list {SEQUENCES} and {STEPS}; {AGAIN}")
    if TREES in checksums and not (meta.get("tree") and all(1 <= n <= MAX_NODES for n in tree_limits(meta))):
        raise InputError(f"{path}: tree does not give nodes and width from 1 to {MAX_NODES}; record it again")
    if meta["checksums"].get(META) != meta_digest(meta):
        raise InputError(f"{path} is altered (its own checksum differs); {AGAIN}")
    return dict(meta)


def tree_limits(meta: dict[str, Any]) -> tuple[int, int]:
    """Return the nodes and the width of the recorded trees."""
    return meta["tree"]["nodes"], meta["tree"]["width"]


def meta_digest(meta: dict[str, Any]) -> str:
    """Compute the checksum of meta.json without its own checksum."""
    others = {name: value for name, value in meta["checksums"].items() if name != META}
    return digest(json.dumps({**meta, "checksums": others}, sort_keys=True), length=64)
