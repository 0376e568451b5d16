"""Read Parquet files that may be damaged or hostile: schema and size are checked while they are unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specsim.io.errors import InputError
from specsim.io.files import unpacked_limit_bytes

INTEGERS = "whole numbers"
FLOATS = "numbers"
TEXT = "text"
FLAGS = "true or false"
VALUE_BYTES = 8  # of a value in memory, at most; equal texts share theirs
BATCH_ROWS = 2**14  # unpacked between two checks of the size
INTEGER_LISTS = "lists of whole numbers"
FLOAT_LISTS = "lists of numbers"


def read_table(path: Path, columns: Mapping[str, str], optional: Iterable[str] = (), *, invalid: str) -> pa.Table:
    """Read columns of a Parquet file, without nulls; text comes as dictionaries.

    columns : what each holds, by the names above; other columns of the file are not read
    optional : columns that may be missing
    invalid : advice that ends the error for any other file
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist; {invalid}")
    try:
        with pq.ParquetFile(path) as file:  # `pq.read_table` would import pandas, a third of the start-up time
            here = _check_columns(file.schema_arrow, path, columns, set(optional), invalid)
            footer = file.metadata
        texts = [name for name in here if columns[name] == TEXT]
        with pq.ParquetFile(path, metadata=footer, read_dictionary=texts) as file:
            limit = unpacked_limit_bytes(path)
            table = _read_within(file, here, limit)
        table.validate(full=True)  # such as whether text is UTF-8
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is not a readable Parquet file ({reason:.200}); {invalid}") from None
    for name in here:
        column = table.column(name)
        leaves = column.combine_chunks().values if columns[name] in (INTEGER_LISTS, FLOAT_LISTS) else column
        if column.null_count or leaves.null_count:
            raise InputError(f"{path}: column {name!r} has nulls; {invalid}")
        if columns[name] == TEXT and len(table) * _longest(column) * 4 > limit:  # as an array of NumPy
            raise InputError(f"{path}: column {name!r} holds too long texts; {invalid}")
    return table


def _read_within(file: pq.ParquetFile, columns: list[str], limit_bytes: int) -> pa.Table:
    """Read these columns in batches; ValueError as soon as they take more than the limit.

    The footer also has the size of each column chunk, but pyarrow 26.0 aborts the process when asked for the chunks of
    a damaged footer.
    """

    def check(size: int) -> None:
        if size > limit_bytes:
            raise ValueError(f"it takes at least {size >> 20} MiB, at most {limit_bytes >> 20} were expected")

    check(file.metadata.num_rows * len(columns) * VALUE_BYTES)
    batches: list[pa.RecordBatch] = []
    read_bytes = 0
    for batch in file.iter_batches(BATCH_ROWS, columns=columns):
        batches.append(batch)
        read_bytes += batch.nbytes
        check(read_bytes)
    table = pa.Table.from_batches(batches, pa.schema([file.schema_arrow.field(name) for name in columns]))
    if len(table) != file.metadata.num_rows:
        raise ValueError(f"it has {len(table)} rows, its footer says {file.metadata.num_rows}")
    return table


def _check_columns(
    schema: pa.Schema, path: Path, columns: Mapping[str, str], optional: set[str], invalid: str
) -> list[str]:
    """List the wanted columns that the file has; raise InputError if their types are wrong."""
    for name in schema.names:
        if schema.names.count(name) > 1 and name in columns:
            raise InputError(f"{path} has column {name!r} twice; {invalid}")
    for name in [name for name in columns if name not in schema.names]:
        if name not in optional:
            raise InputError(f"{path} lacks column {name!r}; {invalid}")
    here = [name for name in columns if name in schema.names]
    for name in here:
        actual = schema.field(name).type
        if not _holds(actual, columns[name]):
            raise InputError(f"{path}: column {name!r} holds {actual!s:.60}, expected {columns[name]}; {invalid}")
    return here


def _holds(kind: Any, wanted: str) -> bool:
    types = pa.types
    if wanted in (INTEGER_LISTS, FLOAT_LISTS):
        is_list = types.is_list(kind) or types.is_fixed_size_list(kind)
        return is_list and _holds(kind.value_type, INTEGERS if wanted == INTEGER_LISTS else FLOATS)
    if wanted == TEXT:
        return types.is_string(kind.value_type if types.is_dictionary(kind) else kind)
    is_wanted = {INTEGERS: types.is_integer, FLOATS: types.is_floating, FLAGS: types.is_boolean}
    return bool(is_wanted[wanted](kind))


def _longest(column: pa.ChunkedArray) -> int:
    texts = [str(text) for chunk in column.chunks for text in chunk.dictionary.to_pylist()]
    return max(map(len, texts), default=0)
