"""Trace folders: `meta.json`, `sequences.parquet`, `steps.parquet` and, with trees, `trees.parquet`."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specsim.arrays import Array, IntArray
from specsim.errors import InputError
from specsim.files import file_digest, replacing, replacing_folder, write_table
from specsim.trace.trace import MAX_DEPTH, NO_TOKEN, OPTIONAL_LISTS, STEP_LISTS, Trace
from specsim.trace.tree_record import MAX_NODES, TreeRecord, record_from_nodes

SCHEMA_VERSION = 2  # 1 ranked true tokens by probability alone, whatever the mode
META = "meta.json"
SEQUENCES = "sequences.parquet"
STEPS = "steps.parquet"
TREES = "trees.parquet"
META_KEYS = ("target", "drafter", "decoding", "depth", "eos_token_id", "dtype", "device")


def write_trace(trace: Trace, folder: Path | str, *, overwrite: bool = False) -> None:
    """Write a trace folder, whole or not at all.

    Parameters
    ----------
    trace : Trace
        N positions in S sequences.
    folder : Path or str
        Made, with `meta.json` and a table each of sequences, positions and, where recorded, trees.
    overwrite : bool
        Replace a trace that is there.

    Raises
    ------
    InputError
        Where the folder is there and is not to be, or cannot be, replaced.

    References
    ----------
    Apache Parquet, https://parquet.apache.org/docs/file-format/ (the tables; their columns are those of `Trace`).

    Examples
    --------
    >>> import pathlib, tempfile, specsim
    >>> from specsim.acceptance.iid import IID
    >>> from specsim.acceptance.synthetic import generate
    >>> trace = generate(IID(0.8), sequences=4, output_tokens=30, depth=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     specsim.write_trace(trace, pathlib.Path(folder, "trace"))
    ...     specsim.read_trace(pathlib.Path(folder, "trace")).output_tokens.tolist()
    [30, 30, 30, 30]
    """
    folder = Path(folder)
    check_free(folder, overwrite=overwrite)
    with replacing_folder(folder) as work:
        write_table(_sequence_table(trace), work / SEQUENCES)
        write_table(_step_table(trace), work / STEPS)
        meta = {**trace.meta, "schema_version": SCHEMA_VERSION, "depth": trace.depth}
        files = [SEQUENCES, STEPS]
        if trace.tree is not None:
            write_table(_tree_table(trace, trace.tree), work / TREES)
            meta["tree"] = {"nodes": trace.tree.nodes, "width": trace.tree.width}
            files.append(TREES)
        meta["checksums"] = {name: file_digest(work / name) for name in files}
        (work / META).write_text(json.dumps(meta, indent=2) + "\n")


def check_free(folder: Path, *, overwrite: bool) -> None:
    """InputError unless a trace may be written here."""
    if folder.exists() and not overwrite:
        raise InputError(f"{folder} exists; choose another name or overwrite it (--overwrite)")
    if folder.exists() and not (folder / META).is_file():
        raise InputError(f"{folder} is no trace and will not be overwritten; choose another name")


def pack_trace(folder: Path, path: Path) -> None:
    """Put a trace folder into one .zip file, which `read_trace` reads as well."""
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:  # Parquet is compressed already
        for name in (META, SEQUENCES, STEPS, TREES):
            if (folder / name).is_file():
                archive.write(folder / name, name)


def read_trace(folder: Path | str) -> Trace:
    """Read and check a recorded trace.

    Parameters
    ----------
    folder : Path or str
        A folder that `realrun record` or `write_trace` made, or one packed as .zip.

    Returns
    -------
    Trace
        N positions in S sequences, [N] and [S] arrays; see there.

    Raises
    ------
    InputError
        Says what is wrong with the folder.

    References
    ----------
    As of `write_trace`.

    Examples
    --------
    >>> import pathlib, tempfile, specsim
    >>> from specsim.acceptance.iid import IID
    >>> from specsim.acceptance.synthetic import generate
    >>> trace = generate(IID(0.8), sequences=4, output_tokens=30, depth=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     specsim.write_trace(trace, pathlib.Path(folder, "trace"))
    ...     specsim.read_trace(pathlib.Path(folder, "trace")).output_tokens.tolist()
    [30, 30, 30, 30]
    """
    folder = Path(folder)
    if folder.suffix == ".zip" and folder.is_file():
        with tempfile.TemporaryDirectory() as unpacked:
            try:
                with zipfile.ZipFile(folder) as archive:
                    for name in set(archive.namelist()) & {META, SEQUENCES, STEPS, TREES}:
                        archive.extract(name, unpacked)
            except (zipfile.BadZipFile, OSError) as error:
                raise InputError(f"{folder} is no readable packed trace ({error}); pack it again") from None
            return read_trace(unpacked)
    meta = _read_meta(folder)
    for name, expected in meta["checksums"].items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path} is missing; copy the whole trace folder or record it again")
        if file_digest(path) != expected:
            raise InputError(f"{path} is truncated or altered (checksum differs); restore or record it again")
    sequences = _read_table(folder / SEQUENCES)
    steps = _read_table(folder / STEPS)
    values: dict[str, Any] = {"meta": meta}
    for name in ("sequence_id", "prompt_tokens", "budget_tokens", "output_tokens"):
        values[name] = _column(sequences, name, np.int64, folder / SEQUENCES)
        if (values[name] < (0 if name in ("sequence_id", "output_tokens") else 1)).any():
            raise InputError(f"{folder / SEQUENCES}: column {name!r} has a value below its least; record it again")
    for name in ("domain", "source"):
        if name == "domain" or name in sequences.column_names:  # traces of before do not name the sources
            values[name] = _column(sequences, name, np.str_, folder / SEQUENCES)
    lengths = values.pop("output_tokens")
    values["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values["token"] = _column(steps, "token", np.int32, folder / STEPS)
    values["match_len"] = _column(steps, "match_len", np.uint8, folder / STEPS)
    for name, dtype in {**STEP_LISTS, **OPTIONAL_LISTS}.items():
        if name in OPTIONAL_LISTS and name not in steps.column_names:
            continue
        values[name] = _list_column(steps, name, dtype, meta["depth"], folder / STEPS)
    rows = _column(steps, "sequence_id", np.int64, folder / STEPS), _column(steps, "t", np.int64, folder / STEPS)
    if TREES in meta["checksums"]:
        values["tree"] = _read_trees(folder / TREES, meta, rows)
    trace = Trace(**values)
    _check(trace, folder, *rows)
    return trace


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.is_file():
        raise InputError(f"{folder} is no trace: {META} is missing; give a folder made by `realrun record`")
    try:
        meta = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no valid JSON ({error}); restore or record it again") from None
    if not isinstance(meta, dict):
        raise InputError(f"{path} holds no JSON object; restore or record it again")
    version = meta.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; record it again")
    missing = [key for key in (*META_KEYS, "checksums") if key not in meta]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}; restore or record it again")
    depth, checksums = meta["depth"], meta["checksums"]
    if not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise InputError(f"{path}: depth {depth!r} is no whole number from 1 to {MAX_DEPTH}; record it again")
    if not isinstance(checksums, dict) or not {SEQUENCES, STEPS} <= set(checksums):
        raise InputError(f"{path}: checksums do not name {SEQUENCES} and {STEPS}; restore or record it again")
    return meta


def _read_table(path: Path) -> pa.Table:
    try:
        # `pq.read_table` and `to_numpy` would import pandas, a third of the start-up time.
        with pq.ParquetFile(path) as file:
            return file.read()
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is no readable Parquet file ({error}); record it again") from None


def _column(table: pa.Table, name: str, dtype: Any, path: Path) -> Array:
    if name not in table.column_names:
        raise InputError(f"{path} lacks column {name!r}; record it again")
    column = table.column(name)
    if column.null_count:
        raise InputError(f"{path}: column {name!r} has nulls; record it again")
    return _as_numpy(column.combine_chunks(), name, dtype, path)


def _as_numpy(column: Any, name: str, dtype: Any, path: Path) -> Array:
    """A writable copy, since the replay kernel is compiled once per array type, read-only being another."""
    wanted = pa.string() if dtype is np.str_ else pa.from_numpy_dtype(dtype)
    try:
        values = column.cast(wanted)
        return np.array(values.to_pylist(), dtype=np.str_) if dtype is np.str_ else np.array(np.from_dlpack(values))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(
            f"{path}: column {name!r} holds {column.type} that does not fit {wanted}; record it again"
        ) from None


def _list_column(table: pa.Table, name: str, dtype: Any, depth: int, path: Path) -> Array:
    if name not in table.column_names:
        raise InputError(f"{path} lacks column {name!r}; record it again")
    column = table.column(name).combine_chunks()
    if not pa.types.is_fixed_size_list(column.type) or column.type.list_size != depth:
        raise InputError(f"{path}: column {name!r} is {column.type}, wanted lists of {depth}; record it again")
    flat = column.flatten()
    if column.null_count or flat.null_count:
        raise InputError(f"{path}: column {name!r} has nulls; record it again")
    values = _as_numpy(flat, name, dtype, path).reshape(len(table), depth)
    if np.issubdtype(dtype, np.floating) and not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0, 0])
        raise InputError(f"{path}: column {name!r} is not finite at row {row}; record it again")
    return values


def _check(trace: Trace, folder: Path, step_sequence_id: IntArray, step_t: IntArray) -> None:
    expected = np.repeat(trace.sequence_id, trace.output_tokens), trace.position
    if not all(map(np.array_equal, (step_sequence_id, step_t), expected)):
        raise InputError(f"{folder / STEPS} does not have the rows that {SEQUENCES} counts; record it again")
    if trace.sequences == 0 or len(trace.token) == 0:
        raise InputError(f"{folder} holds no output token; record at least one")
    if (trace.output_tokens > trace.budget_tokens).any():
        raise InputError(f"{folder / SEQUENCES}: an output is longer than its budget; record it again")
    if trace.match_len.max() > trace.depth:
        raise InputError(f"{folder / STEPS}: match_len exceeds the depth {trace.depth}; record it again")
    proposed = trace.draft_token != NO_TOKEN
    if (proposed[:, 1:] & ~proposed[:, :-1]).any() or (trace.match_len > proposed.sum(axis=1)).any():
        raise InputError(f"{folder / STEPS}: draft_token has a gap, or match_len goes beyond it; record it again")
    prob = trace.accept_prob
    if prob is not None and not ((prob >= 0) & (prob <= 1)).all():
        raise InputError(f"{folder / STEPS}: accept_prob leaves [0, 1]; record it again")


def _read_trees(path: Path, meta: dict[str, Any], rows: tuple[IntArray, IntArray]) -> TreeRecord:
    """The record of trees; `rows` are sequence id and t of every position."""
    shape = meta.get("tree")
    keys = (("nodes", MAX_NODES), ("width", MAX_NODES))
    if not isinstance(shape, dict) or not all(
        type(shape.get(key)) is int and 1 <= shape[key] <= most for key, most in keys
    ):
        raise InputError(
            f"{path.parent / META}: tree does not give nodes and width from 1 to {MAX_NODES}; record it again"
        )
    table = _read_table(path)
    own = [_column(table, name, np.int64, path) for name in ("sequence_id", "t")]
    if not all(map(np.array_equal, own, rows)):
        raise InputError(f"{path} does not have the rows of {STEPS}; record it again")
    nodes: dict[str, Array] = {}
    counts: IntArray | None = None
    for name, dtype, absent in (("parent", np.int16, -1), ("token", np.int32, -1), ("prob", np.float32, 0.0)):
        if name not in table.column_names or not pa.types.is_list(table.column(name).type):
            raise InputError(f"{path}: column {name!r} is missing or holds no lists; record it again")
        column = table.column(name).combine_chunks()
        flat = column.flatten()
        if column.null_count or flat.null_count:
            raise InputError(f"{path}: column {name!r} has nulls; record it again")
        lengths = np.array(np.from_dlpack(column.value_lengths()))
        counts = lengths if counts is None else counts
        if not np.array_equal(lengths, counts):
            raise InputError(f"{path}: columns 'parent' and {name!r} differ in length; record it again")
        if counts.max() > shape["nodes"]:
            raise InputError(f"{path}: a tree has {counts.max()} nodes, more than {shape['nodes']}; record it again")
        nodes[name] = np.full((len(counts), shape["nodes"]), absent, dtype=dtype)
        nodes[name][np.arange(shape["nodes"]) < counts[:, None]] = _as_numpy(flat, name, dtype, path)
    assert counts is not None
    if not np.array_equal((nodes["parent"] >= 0).sum(axis=1), counts):
        raise InputError(f"{path}: column 'parent' has a negative value; record it again")
    horizon = _column(table, "horizon", np.float32, path)
    for name, values in (("prob", nodes["prob"]), ("horizon", horizon)):
        if not ((values >= 0) & (values <= 1)).all():
            raise InputError(f"{path}: column {name!r} leaves [0, 1]; record it again")
    try:
        return record_from_nodes(**nodes, horizon=horizon, width=shape["width"])
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
