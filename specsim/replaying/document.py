"""JSON documents of results as frozen objects, each read and written in a single place."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """A JSON document, or a part of one: its fields are the keys, and those that have their default are left out."""

    @classmethod
    def from_json(cls, data: Any, name: str, invalid: str) -> Self:
        """Read a parsed document; InputError where a key is missing or its value is of another type.

        name : of the document, in the error; invalid : advice that ends it
        """
        try:
            return msgspec.convert(_with_estimates(data), cls)
        except msgspec.ValidationError as error:
            raise InputError(f"{name} is malformed ({error}); {invalid}") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return dict(msgspec.to_builtins(self))

    def as_cells(self) -> dict[str, Any]:
        """Return the fields by name, less those that have their default; parts of the document stay objects."""
        values = ((field, getattr(self, field.name)) for field in msgspec.structs.fields(self))
        return {field.name: value for field, value in values if value is not field.default}


def _with_estimates(data: Any) -> Any:
    """Put estimates in the place of their JSON form, because msgspec cannot make one: it is a number, too."""
    if isinstance(data, list):
        return [_with_estimates(value) for value in data]
    if not isinstance(data, dict):
        return data
    if data.keys() == {"estimate", "low", "high"} and all(isinstance(value, int | float) for value in data.values()):
        return Estimate(**data)
    return {key: _with_estimates(value) for key, value in data.items()}
