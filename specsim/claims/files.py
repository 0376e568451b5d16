"""Claim files, *.claims.toml: read strictly, written whole, brought up to date with their comments kept."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specsim.claims.claim import SUBJECTS, VERSION, Claim, Statement
from specsim.errors import InputError
from specsim.files import write_text
from specsim.speedup.intervals import Estimate

SUFFIX = ".claims.toml"
LARGEST_BYTES = 10_000_000
TOLERANCES = ("tolerance", "tolerance_percent")
COMPOSED = ("ratio", "difference", "order")  # keys that list subjects


def claim_files(paths: Iterable[Path]) -> list[Path]:
    """These files, and of folders all claim files in them; InputError where there is none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.rglob(f"*{SUFFIX}"))
            if not inside:
                raise InputError(f"{path} holds no *{SUFFIX}; write one with `specsim claims record`")
            found.extend(inside)
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def read_claims(path: Path) -> list[Claim]:
    """The claims of a file; InputError names the claim and the key that it cannot take."""
    document = _toml(path)
    unknown = set(document) - {"version", "defaults", "claim"}
    if unknown:
        raise InputError(f"{path}: key {min(unknown)!r} is unknown; a claim file has version, defaults and claim")
    if document.get("version") != VERSION or isinstance(document["version"], bool):
        raise InputError(f"{path}: version is {document.get('version')!r}; this program reads version = {VERSION}")
    defaults, entries = document.get("defaults", {}), document.get("claim", [])
    if not isinstance(defaults, dict):
        raise InputError(f"{path}: defaults is no table; write [defaults]")
    known = set(Statement.model_fields).union(*(kind.model_fields for kind in SUBJECTS.values()))
    for key in defaults:
        if key not in known:
            raise InputError(f"{path}: key {key!r} of defaults is unknown; remove it")
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise InputError(f"{path}: there is no claim; write each under [[claim]]")
    claims = [_claim(entry, defaults, path, number) for number, entry in enumerate(entries, start=1)]
    seen: set[str] = set()
    for claim in claims:
        if claim.name in seen:
            raise InputError(f"{path}: two claims are called {claim.name!r}; rename one")
        seen.add(claim.name)
    return claims


def _toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"claim file {path} does not exist; write one with `specsim claims record`")
    if path.stat().st_size > LARGEST_BYTES:
        raise InputError(f"claim file {path} has over {LARGEST_BYTES} bytes; split it")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of TOML, UTF-8 and integers of too many digits, too
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"claim file {path} is no valid TOML ({text}); mend it") from None


def _claim(entry: dict[str, Any], defaults: Mapping[str, Any], path: Path, number: int) -> Claim:
    """One claim: of its own keys, where those say nothing of the file's defaults."""
    named = entry.get("name")
    where = f"{path}: claim {named!r}" if isinstance(named, str) else f"{path}: claim {number}"
    composed = [key for key in COMPOSED if key in entry]
    if len(composed) > 1:
        raise InputError(f"{where}: {' and '.join(composed)} exclude each other; keep one")
    form = composed[0] if composed else "value"
    stated = set(Statement.model_fields)
    own = {key: value for key, value in entry.items() if key not in stated and key not in COMPOSED}
    parts = entry[form] if composed else [{}]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{where}: {form} is no list of tables; write {form} = [{{ policy = ... }}, ...]")
    subjects = []
    for part in parts:
        keys = {**own, **part}
        kind = _kind(keys, where, None) or _kind(defaults, where, "defaults")
        if kind is None:
            raise InputError(f"{where}: it has no subject; give one of {', '.join(SUBJECTS)}")
        fitting = {key: value for key, value in defaults.items() if key in SUBJECTS[kind].model_fields}
        subjects.append({**fitting, **keys} | {"_kind": kind})
    try:
        statement = Statement(**{key: value for key, value in _with(defaults, entry).items() if key in stated})
        checked = tuple(SUBJECTS[one.pop("_kind")](**one) for one in subjects)
        return Claim.model_validate({"home": path.parent, "statement": statement, "form": form, "subjects": checked})
    except ValidationError as error:
        raise InputError(f"{where}: {_first(error)}") from None


def _with(defaults: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the defaults that it leaves open; of tolerances, only where it has an expected value and none."""
    own = "expected" not in entry or any(key in entry for key in TOLERANCES)
    return {**{key: value for key, value in defaults.items() if not (own and key in TOLERANCES)}, **entry}


def _kind(keys: Mapping[str, Any], where: str, part: str | None) -> str | None:
    found = [key for key in SUBJECTS if key in keys]
    if len(found) > 1:
        of = f" of {part}" if part else ""
        raise InputError(f"{where}: {' and '.join(found)}{of} exclude each other; keep one")
    return found[0] if found else None


def _first(error: ValidationError) -> str:
    """The first thing wrong, in one line."""
    wrong = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in wrong["loc"][:2])
    message = " ".join(wrong["msg"].removeprefix("Value error, ").split())
    if wrong["type"] == "extra_forbidden":
        return f"key {place!r} is unknown here; remove it"
    if wrong["type"] == "missing":
        return f"key {place!r} is missing; give it"
    given = "" if wrong["type"] == "value_error" else f", given {str(wrong['input'])[:60]!r}"
    return f"{place}: {message}{given}" if place else message


def write_claims(
    path: Path, claims: Sequence[Mapping[str, Any]], *, title: str, defaults: Mapping[str, Any] | None = None
) -> None:
    """Write a file of claims given by their keys, under a line that says what they are and what they leave open."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment(title))
    document.add("version", tomlkit.item(VERSION))
    if defaults:
        document.add("defaults", _entry(defaults))
    entries = tomlkit.aot()
    for claim in claims:
        entries.append(_entry(claim))
    document.add("claim", entries)
    write_text(path, tomlkit.dumps(document))


def _entry(claim: Mapping[str, Any]) -> Any:
    """A claim as a table, with what lies deeper on lines of its own."""
    import tomlkit

    table = tomlkit.table()
    for key, value in claim.items():
        item = tomlkit.item(value)
        if isinstance(value, dict):
            item = tomlkit.inline_table()
            item.update(value)
        elif isinstance(value, list):
            item = tomlkit.array()
            for one in value:
                inner = one
                if isinstance(one, dict):
                    inner = tomlkit.inline_table()
                    inner.update(one)
                item.append(inner)
        table.add(key, item)
    return table


def update_expected(path: Path, found: Mapping[str, Estimate]) -> None:
    """Put what was found in the place of what these claims, by name, expect; everything else stays as it is."""
    import tomlkit

    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    entries: Any = document["claim"]
    for entry in entries:
        value = found.get(entry["name"])
        if value is not None:
            whole = _with(document.get("defaults", {}), entry)
            entry["expected"] = rounded(value.estimate, whole)
            if "interval" in entry:
                entry["interval"] = [rounded(end, whole) for end in (value.low, value.high)]
    write_text(path, tomlkit.dumps(document))


def rounded(value: float, claim: Mapping[str, Any]) -> float:
    """A value with two digits more than its claim's tolerance can tell apart."""
    percent = claim.get("tolerance_percent")
    reach = claim.get("tolerance") if percent is None else abs(value) * percent / 100
    if not reach or not math.isfinite(reach):
        return value
    return round(value, max(0, 2 - math.floor(math.log10(reach))))
