"""Mutated copies of valid files: their bytes, the tokens of their JSON, the structure of their JSON or Parquet."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Mutate = Callable[[bytes, Random], bytes]

TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|\s+|.', re.DOTALL)
TOKENS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e308", b"5e-324", b"1e-300", b"-1", b"0", b"-0.0",
    b"0.5", b"1.0", b"9" * 5000, b"9223372036854775807", b"9223372036854775808", b"18446744073709551615",
    b"4294967296", b"2147483648", b"1" + b"0" * 400, b"null", b"true", b"false", b"{}", b"[]", b"[[]]", b'""',
    b'"\\ud800"', b'"\\u0000"', b'"\\n"', b'"' + b"x" * 3000 + b'"', b"[" * 2000, b"[" * 200 + b"]" * 200,
    b'{"a":' * 300, b"\xff", b"\xef\xbb\xbf", b",", b":", b"]", b"}", b'"', b"",
]  # fmt: skip
TOML_TOKENS = [
    *TOKENS, b"nan", b"inf", b"-inf", b"1979-05-27T07:32:00Z", b"0x1F", b"[[claim]]", b"[defaults]", b'"""', b"'''",
    b"=", b"= 1", b"{ a = 1 }", b"{" + b"a = {" * 300, b"[" * 3000 + b"]" * 3000, b"# ", b"\n", b"\x00", b"\xc3\xa9",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.5, 1.0, -0.5, 1e308, 1e-310, 2**31, 2**32, 2**63 - 1, -(2**63), 2**63, 10**30, "",
    "x", "\x00", "a\nb", "1", "é" * 500, [], {}, [[]], [None], [{}], {"a": 1}, [1, 2, 3], [0.1, "x"], [[1], [1, 2]],
    float("nan"), float("inf"), [True], list(range(40)),
]  # fmt: skip
WORDS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def of_bytes(content: bytes, rng: Random) -> bytes:
    """One to four changes of bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(data) + 1)
        length = min(rng.choice((1, 1, 2, 4, 8, 64)), len(data) - place)
        kind = rng.randrange(8)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place : place + length] = rng.randbytes(length)
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            data[place:place] = rng.randbytes(length or 1)
        elif kind == 4:
            data[place:place] = data[place : place + rng.choice((length, 4 * length))]
        elif kind == 5:
            data[place : place + 4] = struct.pack(rng.choice(("<I", ">I")), rng.choice(WORDS))
        elif kind == 6:
            other = rng.randrange(len(data) + 1)
            data[place : place + length] = data[other : other + length]
        else:
            del data[place:]
    return bytes(data)


def of_tokens(content: bytes, rng: Random, others: Sequence[bytes] = TOKENS) -> bytes:
    """One or two changes of tokens of a text of JSON."""
    tokens = TOKEN.findall(content)
    for _ in range(rng.choice((1, 1, 2))):
        place, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        kind = rng.randrange(6)
        if kind <= 2:
            tokens[place] = rng.choice(others)
        elif kind == 3:
            tokens[place] = tokens[other]
        elif kind == 4:
            tokens[place], tokens[other] = tokens[other], tokens[place]
        else:
            tokens[place:place] = tokens[other : other + rng.randrange(1, 6)]
    return b"".join(tokens)


def of_structure(content: bytes, rng: Random) -> bytes:
    """One or two changes of a parsed JSON document, which stays JSON but for numbers that are not finite."""
    document = json.loads(content)
    for _ in range(rng.choice((1, 1, 2))):
        document = _changed(document, rng)
    return json.dumps(document).encode()


def _changed(document: Any, rng: Random) -> Any:
    places = list(_places(document))
    if not places:
        return deepcopy(rng.choice(VALUES))
    inside, key = rng.choice(places)
    kind = rng.randrange(7)
    if kind <= 2:
        inside[key] = deepcopy(rng.choice(VALUES))
    elif kind == 3:
        del inside[key]
    elif kind == 4:
        inside[key] = rng.choice(([inside[key]], {"a": inside[key]}))
    elif kind == 5:
        there, other = rng.choice(places)
        inside[key] = deepcopy(there[other])  # still there, as only this change has been made
    elif isinstance(inside, list):
        inside[key:key] = [deepcopy(inside[key]) for _ in range(rng.choice((1, 1, 30)))]
    else:
        inside[rng.choice(("", "x", key + "s", "kind", "version"))] = inside.pop(key)
    return deepcopy(rng.choice(VALUES)) if rng.random() < 0.01 else document


def _places(document: Any) -> Any:
    inside = document if isinstance(document, (dict, list)) else []
    for key, value in list(inside.items() if isinstance(inside, dict) else enumerate(inside)):
        yield document, key
        yield from _places(value)


def of_json(content: bytes, rng: Random) -> bytes:
    """Bytes, tokens or structure."""
    return rng.choice((of_bytes, of_tokens, of_structure, of_structure))(content, rng)


def of_toml(content: bytes, rng: Random) -> bytes:
    """Bytes or tokens of a text of TOML."""
    return of_bytes(content, rng) if rng.random() < 0.4 else of_tokens(content, rng, TOML_TOKENS)


def of_json_lines(content: bytes, rng: Random) -> bytes:
    """One line."""
    lines = content.split(b"\n")
    place = rng.choice([number for number, line in enumerate(lines) if line])
    lines[place] = of_json(lines[place], rng)
    return b"\n".join(lines)


def of_log(content: bytes, rng: Random) -> bytes:
    """Bytes, tokens or whole lines of a text."""
    kind = rng.randrange(4)
    if kind < 3:
        return (of_bytes, of_tokens, of_tokens)[kind](content, rng)
    lines = content.splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[place : place + rng.randrange(2)] = lines[other : other + rng.randrange(4)]
    return b"".join(lines)


def of_json_header(content: bytes, rng: Random) -> bytes:
    """A file of safetensors: its bytes, or its header, whose length stays right."""
    if rng.random() < 0.3:
        return of_bytes(content, rng)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    names = [name for name, value in header.get("__metadata__", {}).items() if value[:1] == "{"]
    if names and rng.random() < 0.6:
        name = rng.choice(names)
        header["__metadata__"][name] = of_json(header["__metadata__"][name].encode(), rng).decode(errors="replace")
        whole = json.dumps(header).encode()
    else:
        whole = of_json(content[8:end], rng)
    return len(whole).to_bytes(8, "little") + whole + content[end:]


TYPES = [
    pa.string(), pa.binary(), pa.float64(), pa.float32(), pa.int8(), pa.int64(), pa.uint64(), pa.bool_(),
    pa.timestamp("ns"), pa.decimal128(38, 2), pa.large_string(), pa.null(),
]  # fmt: skip
NUMBERS = [0, -1, 1, 255, 256, 2**15, 2**31, 2**62, -(2**62)]


def of_parquet(content: bytes, rng: Random) -> bytes:
    """Bytes, or the table's columns, types and values."""
    if rng.random() < 0.6:
        return of_bytes(content, rng)
    table = pq.ParquetFile(io.BytesIO(content)).read()
    for _ in range(rng.choice((1, 1, 2))):
        table = _with_change(table, rng)
    written = io.BytesIO()
    pq.write_table(table, written, row_group_size=rng.choice((None, 7)))
    return written.getvalue()


def _with_change(table: pa.Table, rng: Random) -> pa.Table:
    if not table.num_columns:
        return table
    place = rng.randrange(table.num_columns)
    field, column = table.schema.field(place), table.column(place)
    kind = rng.randrange(7)
    if kind == 0:
        return table.remove_column(place)
    if kind == 1:
        return table.append_column(field, column)
    if kind == 2:
        return table.slice(rng.randrange(-1, 3) % (len(table) + 1), rng.randrange(len(table) + 1))
    if kind == 3:
        return table.append_column("other", column)
    if kind == 4:
        wanted = rng.choice(TYPES)
        if column.type.num_fields:
            wanted = rng.choice((pa.list_(wanted), pa.large_list(wanted), pa.list_(wanted, 3), wanted))
        return table.set_column(place, field.name, pa.nulls(len(table), wanted))
    values = column.to_pylist()
    if values:
        row = rng.randrange(len(values))
        values[row] = _value(values[row], rng)
    try:
        return table.set_column(place, field.name, pa.array(values, None if kind == 5 else field.type))
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return table.remove_column(place)


def _value(value: Any, rng: Random) -> Any:
    if rng.random() < 0.15:
        return None
    if isinstance(value, list):
        if value and rng.random() < 0.7:
            place = rng.randrange(len(value))
            return [*value[:place], _value(value[place], rng), *value[place + 1 :]]
        return rng.choice(([], value * 2, value[:-1]))
    if isinstance(value, float):
        return rng.choice((float("nan"), float("inf"), -0.5, 1.5, 1e300, 1e-40))
    return rng.choice((*NUMBERS, value + 1)) if type(value) is int else rng.choice(("", "x" * 5000, "\x00", "é"))


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def of_zip(content: bytes, rng: Random) -> bytes:
    """Bytes, most of them of the directory and the headers, or other compression, names and contents."""
    kind = rng.randrange(4)
    if kind == 0:
        return of_bytes(content, rng)
    if kind == 1:
        at = content.rfind(b"PK\x01\x02", 0, rng.randrange(len(content) // 2, len(content)))
        at = max(at, 0)
        return content[:at] + of_bytes(content[at : at + 60], rng) + content[at + 60 :]
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(written, "w", rng.choice(METHODS)) as new:
        names = old.namelist()
        place = rng.randrange(len(names))
        for number, name in enumerate(names):
            data = old.read(name)
            if number == place:
                data = rng.choice((of_bytes(data, rng), data))
                name = rng.choice((name, name, "../" + name, name + "x"))
            new.writestr(name, data)
    whole = written.getvalue()
    return whole if kind == 2 else of_bytes(whole, rng)
