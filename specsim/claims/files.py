"""Read claim files (*.claims.toml) strictly, write them, and update expected values without losing comments."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from specsim.claims.claim import SUBJECTS, VERSION, Claim, Statement, Subject
from specsim.io.errors import InputError
from specsim.io.files import write_text
from specsim.replaying.intervals import Estimate

SUFFIX = ".claims.toml"
LARGEST_BYTES = 10_000_000
MAX_NUMBER = 2.0**63  # so that integers fit 64 bits
TOLERANCES = ("tolerance", "tolerance_percent")
COMPOSED = ("ratio", "difference", "order")  # keys that list subjects


def claim_files(paths: Iterable[Path]) -> list[Path]:
    """List these files, and all claim files of these folders; InputError for a folder without any."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"{path} holds no *{SUFFIX}; write a file with `specsim claims record`")
        files += inside
    return list(dict.fromkeys(files))


def read_claims(path: Path) -> list[Claim]:
    """Read the claims of a file; InputError names the claim and the key that is wrong."""
    document = _toml(path)
    unknown = set(document) - {"version", "defaults", "claim"}
    if unknown:
        raise InputError(f"{path}: key {min(unknown)!r} is unknown; a claim file has version, defaults and claim")
    if document.get("version") != VERSION or isinstance(document["version"], bool):
        raise InputError(f"{path}: version is {document.get('version')!r}; this program reads version = {VERSION}")
    defaults, entries = document.get("defaults", {}), document.get("claim", [])
    if not isinstance(defaults, dict):
        raise InputError(f"{path}: defaults is not a table; write [defaults]")
    known = set(Statement.__struct_fields__).union(*(kind.__struct_fields__ for kind in SUBJECTS.values()))
    for key in defaults:
        if key not in known:
            raise InputError(f"{path}: key {key!r} of defaults is unknown; remove it")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{path}: there is no claim; write each under [[claim]]")
    _check_plain(defaults, f"{path}: defaults")
    claims = [_claim(entry, defaults, path, number) for number, entry in enumerate(entries, start=1)]
    seen: set[str] = set()
    for claim in claims:
        if claim.name in seen:
            raise InputError(f"{path}: two claims are called {claim.name!r}; rename either")
        seen.add(claim.name)
    return claims


def _check_plain(value: Any, where: str) -> None:
    """Raise InputError for text that does not fit on a terminal line, and for numbers that are not finite."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, where)
            _check_plain(item, f"{where}: {key}")
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, where)
    elif isinstance(value, str) and not value.isprintable():
        raise InputError(f"{where}: {value[:60]!r} holds unprintable characters; write a line of plain text")
    elif isinstance(value, int | float) and not abs(value) < MAX_NUMBER:
        raise InputError(f"{where}: {str(value)[:20]} is not a finite number below {MAX_NUMBER:g}")


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"claim file {path} does not exist; write it with `specsim claims record`")
    if path.stat().st_size > LARGEST_BYTES:
        raise InputError(f"claim file {path} has over {LARGEST_BYTES} bytes; split it")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 and integers of too many digits, too
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"claim file {path} is not valid TOML ({text}); correct it") from None


def _claim(entry: dict[str, Any], defaults: Mapping[str, Any], path: Path, number: int) -> Claim:
    """A claim from its own keys and, where these say nothing, the file's defaults."""
    name = entry.get("name")
    where = f"{path}: claim {name!r}" if isinstance(name, str) else f"{path}: claim {number}"
    _check_plain(entry, where)
    composed = [key for key in COMPOSED if key in entry]
    if len(composed) > 1:
        raise InputError(f"{where}: {' and '.join(composed)} exclude each other; keep a single key")
    form: Any = composed[0] if composed else "value"
    own = {key: value for key, value in entry.items() if key not in (*Statement.__struct_fields__, *COMPOSED)}
    parts = entry[form] if composed else [{}]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{where}: {form} is not a list of tables; write {form} = [{{ policy = ... }}, ...]")
    stated = {
        key: value for key, value in _with_defaults(defaults, entry).items() if key in Statement.__struct_fields__
    }
    try:
        subjects = tuple(_subject({**own, **part}, defaults, where) for part in parts)
        return Claim(path.parent, msgspec.convert(stated, Statement), form, subjects)
    except ValueError as error:  # of the classes' own checks, and msgspec's of the types
        raise InputError(f"{where}: {_in_words(error)}") from None


def _subject(keys: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> Subject:
    kind = _kind(keys, where, "") or _kind(defaults, where, " of defaults")
    if kind is None:
        raise InputError(f"{where}: the subject is missing; give one of {', '.join(SUBJECTS)}")
    fitting = {key: value for key, value in defaults.items() if key in SUBJECTS[kind].__struct_fields__}
    return msgspec.convert({**fitting, **keys}, SUBJECTS[kind])


def _with_defaults(defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the file's defaults; a default tolerance only where the entry expects a value without its own."""
    own = "expected" not in entry or any(key in entry for key in TOLERANCES)
    return {**{key: value for key, value in defaults.items() if not (own and key in TOLERANCES)}, **entry}


def _kind(keys: Mapping[str, Any], where: str, place: str) -> str | None:
    kinds = [key for key in SUBJECTS if key in keys]
    if len(kinds) > 1:
        raise InputError(f"{where}: {' and '.join(kinds)}{place} exclude each other; keep a single key")
    return kinds[0] if kinds else None


def _in_words(error: ValueError) -> str:
    """Describe what is wrong with a claim's keys, in a line."""
    message, _, place = str(error).partition(" - at `$")
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", message):
        message = f"key {match[1]!r} is unknown here; remove it"
    elif match := re.fullmatch(r"Object missing required field `(.*)`", message):
        message = f"key {match[1]!r} is missing; give it"
    place = place.strip(".`")
    return f"{place}: {message}" if place else message


def write_claims(path: Path, claims: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Write a file of claims, given by their keys, under a title."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment(title))
    document.add("version", tomlkit.item(VERSION))
    entries = tomlkit.aot()
    for claim in claims:
        entries.append(_entry(claim))
    document.add("claim", entries)
    write_text(path, tomlkit.dumps(document))


def _entry(claim: Mapping[str, Any]) -> Any:
    """A claim as a table, with inline tables for what lies deeper."""
    import tomlkit

    table = tomlkit.table()
    for key, value in claim.items():
        table.add(key, _inline(value))
    return table


def _inline(value: Any) -> Any:
    import tomlkit

    if isinstance(value, dict):
        item: Any = tomlkit.inline_table()
        item.update(value)
        return item
    if isinstance(value, list):
        item = tomlkit.array()
        for entry in value:
            item.append(_inline(entry))
        return item
    return tomlkit.item(value)


def update_expected(path: Path, values: Mapping[str, Estimate]) -> None:
    """Replace the expected values of claims, given by name; everything else in the file stays as it is."""
    import tomlkit

    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    entries: Any = document["claim"]
    for entry in entries:
        value = values.get(entry["name"])
        if value is not None:
            whole = _with_defaults(document.get("defaults", {}), entry)
            entry["expected"] = rounded(value.estimate, whole)
            if "interval" in entry:
                entry["interval"] = [rounded(end, whole) for end in (value.low, value.high)]
    write_text(path, tomlkit.dumps(document))


def rounded(value: float, claim: Mapping[str, Any]) -> float:
    """Round a value to two digits more than its claim's tolerance."""
    percent = claim.get("tolerance_percent")
    reach = claim.get("tolerance") if percent is None else abs(value) * percent / 100
    if not reach or not math.isfinite(reach):
        return value
    return round(value, max(0, 2 - math.floor(math.log10(reach))))
