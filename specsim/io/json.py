"""Read JSON strictly, and check documents against type hints.

A file may come from another machine, an editor or a broken disk. The parser refuses numbers that are not finite or
beyond 64 bits, repeated keys, invalid Unicode, and documents that are too large or nested too deeply. msgspec checks
the types; its own parser accepts repeated keys and any nesting, so it does not read the text.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from reprlib import repr as short
from typing import IO, Any, AnyStr, TypeVar

from specsim.io.errors import InputError

MAX_BYTES = 2**24  # of a document; parsed, it may take fifty times as much memory
MAX_NESTING = 50  # of lists and objects
INT64 = range(-(2**63), 2**63)


def read_json(
    path: Path, name: str, shape: Any = Any, *, missing: str, invalid: str, max_bytes: int = MAX_BYTES
) -> Any:
    """Read and check a JSON file, which errors call `name`.

    shape : see `checked`
    missing, invalid : advice that ends the error where the file is missing, or is not such a document
    """
    if not path.is_file():
        raise InputError(f"{name} does not exist; {missing}")
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror}); make it readable") from None
    return parse_json(content, name, shape, invalid=invalid, max_bytes=max_bytes)


def bounded_lines(file: IO[AnyStr], most: int = MAX_BYTES) -> Iterator[AnyStr]:
    """Iterate over the lines of a file, each cut after `most` + 1 characters (or bytes)."""
    while line := file.readline(most + 1):
        yield line
        newline = "\n" if isinstance(line, str) else b"\n"
        while len(line) > most and not line.endswith(newline):
            line = file.readline(most + 1)


def parse_json(text: bytes | str, name: str, shape: Any = Any, *, invalid: str, max_bytes: int = MAX_BYTES) -> Any:
    """Parse and check a JSON text, which errors call `name`."""
    try:
        if len(text) > max_bytes:
            raise ValueError(f"larger than {max_bytes >> 20} MiB")
        whole = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        document = json.loads(
            whole, object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_float
        )
        if "\\u" in whole:  # half a pair of surrogates can be written like this, but not printed
            json.dumps(document, ensure_ascii=False).encode()
        _check_nesting(document)
    except RecursionError:
        raise InputError(f"{name} is not valid JSON (nested deeper than {MAX_NESTING}); {invalid}") from None
    except ValueError as error:
        raise InputError(f"{name} is not valid JSON ({error}); {invalid}") from None
    return checked(document, name, shape, invalid=invalid)


def plain_json(value: object, name: str, *, invalid: str) -> Any:
    """Parse a mapping as if it had been read from its file: lists for tuples and arrays, and the same checks."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        if hasattr(item, "tolist"):  # an array or number of NumPy
            return item.tolist()
        raise InputError(f"{name} holds a {type(item).__name__}; {invalid}")

    return parse_json(json.dumps(value, default=plain), name, invalid=invalid)


def checked(value: Any, name: str, shape: Any, *, invalid: str) -> Any:
    """Return the value if it has this shape, else raise InputError.

    shape : a type hint that msgspec reads: a TypedDict (the value may have more keys), list[...], a Literal, a union;
        a whole number is a float, too, and true is not a number
    """
    import msgspec  # here, since most commands read no document before they print their help

    try:
        msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        raise InputError(f"{name} is malformed ({error}); {invalid}") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        key = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"key {short(key)} is repeated")
    return document


def _integer(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in INT64:
        raise ValueError(f"{text[:20]}... is a whole number beyond 64 bits")
    return value


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _check_nesting(document: Any) -> None:
    containers = [document]
    for _ in range(MAX_NESTING + 1):
        containers = [item for item in containers if type(item) in (dict, list)]
        if not containers:
            return
        containers = [child for item in containers for child in (item.values() if type(item) is dict else item)]
    raise RecursionError


T = TypeVar("T")


def check_keys(keys: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    """Raise InputError for a key that is not known."""
    for key in keys:
        if key not in set(known):
            raise InputError(f"{name} has an unknown key {key!r}; known: {', '.join(sorted(known))}")


def from_keys(keys: Any, kind: type[T], name: str, invalid: str) -> T:
    """Build a dataclass from a JSON object; InputError for unknown keys and values of another type."""
    import msgspec

    checked(keys, name, dict[str, Any], invalid=invalid)
    check_keys(keys, {field.name for field in fields(kind)}, name)  # type: ignore[arg-type]
    try:
        return msgspec.convert(keys, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # of the class's own checks
            raise InputError(f"{name}: {error.__cause__}") from None
        raise InputError(f"{name} is malformed ({error}); {invalid}") from None
