"""Parquet as every reader takes it: columns and sizes are checked in the footer, before anything is unpacked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specsim.errors import InputError
from specsim.files import unpacked_limit_bytes
from specsim.parquet_footer import unpacked_bytes

INTEGERS = "whole numbers"
FLOATS = "numbers"
TEXT = "text"
FLAGS = "true or false"
MARKS = "0, 1 or null"
INTEGER_LISTS = "lists of whole numbers"
FLOAT_LISTS = "lists of numbers"


def read_table(path: Path, columns: Mapping[str, str], optional: Iterable[str] = (), *, invalid: str) -> pa.Table:
    """The columns of a Parquet file, without nulls but in marks; text comes as dictionaries.

    columns : what each is to hold, one of the names above; others in the file are not read
    optional : of these, those that may be missing
    invalid : what to do about any other file, as InputError says
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
            if (size := unpacked_bytes(path, here)) > limit:
                raise InputError(f"{path} would take {size >> 20} MiB, at most {limit >> 20} were expected; {invalid}")
            table = file.read(columns=here)
        table.validate(full=True)  # such as whether text is UTF-8
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is no readable Parquet file ({reason:.200}); {invalid}") from None
    for name in here:
        column = table.column(name)
        leaves = column.combine_chunks().values if columns[name] in (INTEGER_LISTS, FLOAT_LISTS) else column
        if columns[name] != MARKS and (column.null_count or leaves.null_count):
            raise InputError(f"{path}: column {name!r} has nulls; {invalid}")
        if columns[name] == TEXT and len(table) * _longest(column) * 4 > limit:  # as an array of NumPy
            raise InputError(f"{path}: column {name!r} holds too long texts; {invalid}")
    return table


def _check_columns(
    schema: pa.Schema, path: Path, columns: Mapping[str, str], optional: set[str], invalid: str
) -> list[str]:
    """Those of the columns that are there."""
    for name in schema.names:
        if schema.names.count(name) > 1 and name in columns:
            raise InputError(f"{path} has column {name!r} twice; {invalid}")
    for name in [name for name in columns if name not in schema.names]:
        if name not in optional:
            raise InputError(f"{path} lacks column {name!r}; {invalid}")
    here = [name for name in columns if name in schema.names]
    for name in here:
        found = schema.field(name).type
        if not _holds(found, columns[name]):
            raise InputError(f"{path}: column {name!r} holds {found!s:.60}, wanted {columns[name]}; {invalid}")
    return here


def _holds(kind: Any, wanted: str) -> bool:
    types = pa.types
    if wanted in (INTEGER_LISTS, FLOAT_LISTS):
        is_list = types.is_list(kind) or types.is_fixed_size_list(kind)
        return is_list and _holds(kind.value_type, INTEGERS if wanted == INTEGER_LISTS else FLOATS)
    if wanted == TEXT:
        return types.is_string(kind.value_type if types.is_dictionary(kind) else kind)
    if wanted == MARKS:
        return bool(types.is_boolean(kind) or types.is_integer(kind))
    is_wanted = {INTEGERS: types.is_integer, FLOATS: types.is_floating, FLAGS: types.is_boolean}
    return bool(is_wanted[wanted](kind))


def _longest(column: pa.ChunkedArray) -> int:
    """Characters of the longest of its texts, or bytes, at most."""
    texts = [str(text) for chunk in column.chunks for text in chunk.dictionary.to_pylist()]
    return max(map(len, texts), default=0)
