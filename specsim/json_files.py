"""JSON as every reader takes it: one strict parser, and the shapes of documents as plain type hints.

A file may come from another machine, an editor or a broken disk. What a reader could stumble over later is refused
here: numbers that are not finite or beyond 64 bits, keys given twice, text that is no Unicode, documents nested too
deep or too large. Shapes are checked by hand, since importing pydantic takes a tenth of a second, and a replay not much
more.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import IO, Any, AnyStr, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from specsim.errors import InputError

MAX_BYTES = 2**24  # of a document; parsed, it may take fifty times as much memory
MAX_NESTING = 50  # of lists and objects inside one another
INT64 = range(-(2**63), 2**63)
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def read_json(
    path: Path, name: str, shape: Any = Any, *, missing: str, invalid: str, max_bytes: int = MAX_BYTES
) -> Any:
    """The JSON document of a file, which errors call `name`.

    shape : as of `checked`
    missing, invalid : what to do where there is no file, or no such document in it, as InputError says
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
    """The lines of a file; of one with more than `most` characters or bytes the first `most` + 1, never the rest."""
    while line := file.readline(most + 1):
        yield line
        newline = "\n" if isinstance(line, str) else b"\n"
        while len(line) > most and not line.endswith(newline):
            line = file.readline(most + 1)


def parse_json(text: bytes | str, name: str, shape: Any = Any, *, invalid: str, max_bytes: int = MAX_BYTES) -> Any:
    """The document of a text; InputError calls it `name` and says what to do about it."""
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
        raise InputError(f"{name} is no valid JSON (nested deeper than {MAX_NESTING}); {invalid}") from None
    except ValueError as error:
        raise InputError(f"{name} is no valid JSON ({error}); {invalid}") from None
    return checked(document, name, shape, invalid=invalid)


def plain_json(value: object, name: str, *, invalid: str) -> Any:
    """A mapping as the document of its file would be parsed: with lists for tuples and arrays, and the same checks."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        if hasattr(item, "tolist"):  # an array, or one of numpy's numbers
            return item.tolist()
        raise InputError(f"{name} holds a {type(item).__name__}; {invalid}")

    return parse_json(json.dumps(value, default=plain), name, invalid=invalid)


def checked(value: Any, name: str, shape: Any, *, invalid: str) -> Any:
    """The value if it has this shape, else InputError.

    shape : a TypedDict, of which the value may have more keys, or list[...], tuple[..., ...], dict[str, ...], a
        Literal, a union, int, float, str, bool, None or Any. A whole number is a float, too; true is no number.
    """
    problem = _mismatch(value, shape)
    if problem:
        raise InputError(f"{name} is malformed ({problem}); {invalid}")
    return value


def _mismatch(value: Any, shape: Any, where: str = "") -> str:
    """Where a value leaves a shape, and what was wanted there; "" where it does not."""
    kind = get_origin(shape) or shape
    if shape is Any:
        return ""
    if is_typeddict(shape):
        if type(value) is not dict:
            return _unlike(value, dict, where)
        for key, (one, required) in _fields(shape).items():
            if key not in value:
                if required:
                    return f"{where}.{key} is missing".removeprefix(".")
                continue
            if problem := _mismatch(value[key], one, f"{where}.{key}".removeprefix(".")):
                return problem
        return ""
    if kind in (Union, UnionType):
        options = get_args(shape)
        problems = [_mismatch(value, option, where) for option in options]
        like = [problem for problem, option in zip(problems, options, strict=True) if _base(option) is type(value)]
        return "" if "" in problems else (like or [_unlike(value, shape, where)])[0]
    if kind is Literal:
        known = get_args(shape)
        return "" if any(type(value) is type(one) and value == one for one in known) else _unlike(value, shape, where)
    if kind in (list, tuple) and type(value) is list:
        one = get_args(shape)[0]
        return next(filter(None, (_mismatch(item, one, f"{where}[{i}]") for i, item in enumerate(value))), "")
    if kind is dict and type(value) is dict:
        one = get_args(shape)[1]
        return next(filter(None, (_mismatch(item, one, f"{where}[{short(key)}]") for key, item in value.items())), "")
    fits = type(value) is (NoneType if shape is None else kind) or (kind is float and type(value) is int)
    return "" if fits else _unlike(value, shape, where)


def _unlike(value: Any, shape: Any, where: str) -> str:
    found = WORDS[type(value)] if isinstance(value, (list, dict)) else f"{json.dumps(value):.40}"
    return f"{where or 'it'} is {found}, wanted {_words(shape)}"


def _words(shape: Any) -> str:
    if get_origin(shape) is Literal:
        return " or ".join(json.dumps(one) for one in get_args(shape))
    if get_origin(shape) in (Union, UnionType):
        return " or ".join(map(_words, get_args(shape)))
    return WORDS[_base(shape)]


def _base(shape: Any) -> Any:
    """The type of JSON's that a shape is of."""
    return dict if is_typeddict(shape) else NoneType if shape is None else get_origin(shape) or shape


@cache
def _fields(shape: Any) -> Mapping[str, tuple[Any, bool]]:
    """Shape of each key of a TypedDict, and whether it must be there."""
    hints = get_type_hints(shape, include_extras=True)
    optional = {key for key, hint in hints.items() if get_origin(hint) is NotRequired}
    return {key: (get_args(hint)[0] if key in optional else hint, key not in optional) for key, hint in hints.items()}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = (Counter(key for key, _ in pairs) - Counter(found.keys())).items()
        raise ValueError(f"key {short(key)} is given twice")
    return found


def _integer(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in INT64:
        raise ValueError(f"{text[:20]}... is a whole number beyond 64 bits")
    return value


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _check_nesting(document: Any) -> None:
    level = [document]
    for _ in range(MAX_NESTING + 1):
        level = [one for one in level if type(one) in (dict, list)]
        if not level:
            return
        level = [item for one in level for item in (one.values() if type(one) is dict else one)]
    raise RecursionError
