"""Settings of trainings: frozen dataclasses whose fields know their legal values and their help.

Creation checks the values, and `realrun train` makes its options of the fields, so that each is written down once.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from specsim.cli.console import parse_numbers
from specsim.errors import InputError

INHERITED = ("seed", "device", "dtype")  # fields that a nested dataclass gets from the command's options of that name

S = TypeVar("S", bound="Settings")


def setting(
    default: Any = MISSING,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    doc: str = "",
    smoke: Any = MISSING,
) -> Any:
    """A field of `Settings`.

    Parameters
    ----------
    default : any, optional
        A `Settings` class stands for settings inside these.
    low, high : float, optional
        Ends of the legal range, themselves legal.
    above, below : float, optional
        Bounds that are not legal themselves.
    doc : str
        Help of the field's option; a field without it is none.
    smoke : any, optional
        The value in a smoke test, or a function that makes it of the value asked for.
    """
    metadata = {"low": low, "high": high, "above": above, "below": below, "doc": doc, "smoke": smoke}
    if isinstance(default, type) and issubclass(default, Settings):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base of settings, each field a `setting(...)`. Raises InputError for a value that is not legal."""

    def __post_init__(self) -> None:
        for option in _fields(type(self)):
            _check(type(self).__name__, option, getattr(self, option.name))


class Option(NamedTuple):
    """A field as a command's option.

    kind : bool, int, float, str, Path, or tuple for numbers
    choices : all legal values, where they are words
    """

    name: str
    kind: type
    default: Any
    optional: bool
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    above: float | None
    below: float | None
    doc: str
    smoke: Any

    @property
    def wanted(self) -> str:
        """The legal range in words."""
        words = {"at least": self.low, "more than": self.above, "at most": self.high, "less than": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


def options_of(kind: type[Settings]) -> Iterator[Option]:
    """The fields with help, those of settings inside these settings too."""
    for option in _fields(kind):
        if issubclass(option.kind, Settings):
            yield from options_of(option.kind)
        elif option.doc:
            yield option


def from_options(kind: type[S], given: Mapping[str, Any], *, smoke_test: bool = False) -> S:
    """Settings from a command's options; those inside them, too."""
    values: dict[str, Any] = {}
    for option in _fields(kind):
        if issubclass(option.kind, Settings):
            values[option.name] = from_options(option.kind, given, smoke_test=smoke_test)
        elif option.name in given and (option.doc or option.name in INHERITED):
            values[option.name] = _from_text(option, given[option.name])
        if smoke_test and option.smoke is not MISSING:
            values[option.name] = option.smoke(values[option.name]) if callable(option.smoke) else option.smoke
    return kind(**values)


def _from_text(option: Option, value: Any) -> Any:
    """Numbers and words that a command line gives as text."""
    if option.choices and value is not None:
        return str(value)
    if option.kind is not tuple or not isinstance(value, str):
        return value
    return tuple(parse_numbers(value, "--" + option.name.replace("_", "-"), float, "0,0.8"))


def _fields(kind: type[Settings]) -> tuple[Option, ...]:
    hints, found = typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        hint, choices = hints[field.name], ()
        optional = isinstance(hint, types.UnionType)  # X | None
        if optional:
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        if typing.get_origin(hint) is Literal:
            hint, choices = str, typing.get_args(hint)
        hint = typing.get_origin(hint) or hint
        found.append(Option(field.name, hint, field.default, optional, choices, **field.metadata))
    return tuple(found)


def _check(owner: str, option: Option, value: Any) -> None:
    if option.optional and value is None:
        return
    if option.choices and value not in option.choices:
        raise InputError(f"{option.name}={value!r} of {owner} is unknown; known: {', '.join(option.choices)}")
    legal = (
        (option.low is None or value >= option.low)  # NaN is nowhere
        and (option.above is None or value > option.above)
        and (option.high is None or value <= option.high)
        and (option.below is None or value < option.below)
    )
    if not legal:
        raise InputError(f"{option.name}={value} of {owner} is out of range; give {option.wanted}")
