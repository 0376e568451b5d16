"""Objects from the keys of a JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from specsim.io.errors import InputError
from specsim.io.json import checked

T = TypeVar("T")


def check_keys(keys: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    """Raise InputError for a key that is not known."""
    for key in keys:
        if key not in set(known):
            raise InputError(f"{name} has an unknown key {key!r}; known: {', '.join(sorted(known))}")


def from_keys(keys: Any, kind: type[T], name: str, invalid: str, *, own: Iterable[str] = ()) -> T:
    """Build a dataclass from a JSON object; InputError for unknown keys and values of another type.

    own : fields that a document cannot set
    """
    import msgspec

    checked(keys, name, dict[str, Any], invalid=invalid)
    check_keys(keys, {field.name for field in fields(kind)} - {*own}, name)  # type: ignore[arg-type]
    try:
        return msgspec.convert(keys, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # of the class's own checks
            raise InputError(f"{name}: {error.__cause__}") from None
        raise InputError(f"{name} is malformed ({error}); {invalid}") from None
