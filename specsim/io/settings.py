"""Settings: frozen dataclasses whose fields are the options of a command, each written down once.

A field's name, type, default and help become the option; `specsim.cli.command` makes commands of them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from specsim.io.errors import InputError

INHERITED = ("seed", "device", "dtype")  # fields that nested settings get from the command's options of that name
NUMBERS_EXAMPLE = {int: "1,8,64", float: "0.1,0.5"}
SHORT_FLAGS = {
    "--batch": "-b",
    "--cost": "-c",
    "--drafter": "-d",
    "--engine": "-e",
    "--gpu": "-g",
    "--num-prompts": "-n",
    "--out": "-o",
    "--policy": "-p",
    "--set": "-s",
    "--target": "-t",
}
OUTPUT = "Output"  # panel of the options that say where and how results are written
OUTPUT_NAMES = ("out", "overwrite", "resume", "json")

S = TypeVar("S", bound="Settings")
Number = TypeVar("Number", int, float)


def setting(
    default: Any = ...,
    doc: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    flag: str = "",
    metavar: str | None = None,
    smoke: Any = MISSING,
) -> Any:
    """Make a field of `Settings`.

    Parameters
    ----------
    default : any, optional
        `...` marks a required option; a `Settings` class stands for nested settings.
    doc : str
        Help of the field's option; a field without help does not become an option.
    low, high : float, optional
        Ends of the legal range, themselves legal.
    above, below : float, optional
        Bounds that are not legal themselves.
    flag : str
        The option's name, if it differs from the field's; "--on/--off" for both values of a bool.
    metavar : str, optional
        What help shows for the value.
    smoke : any, optional
        The value in a smoke test, or a function that makes it from the value asked for.
    """
    metadata = {"low": low, "high": high, "above": above, "below": below, "doc": doc, "smoke": smoke}
    metadata |= {"flag": flag, "metavar": metavar, "positional": False}
    return _field(default, metadata)


def argument(doc: str, *, default: Any = ..., metavar: str | None = None) -> Any:
    """Make a field of `Settings` that is a positional argument of the command."""
    metadata: dict[str, Any] = dict.fromkeys(("low", "high", "above", "below"))
    metadata |= {"doc": doc, "smoke": MISSING, "flag": "", "metavar": metavar, "positional": True}
    return _field(default, metadata)


def _field(default: Any, metadata: dict[str, Any]) -> Any:
    if default is ...:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, type) and issubclass(default, Settings):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base of settings, each field a `setting(...)`. Raises InputError for a value that is not legal.

    panel : heading in a command's help of the options that this class adds, not those that its subclasses add
    """

    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for option in fields_of(type(self)):
            _check(type(self).__name__, option, getattr(self, option.name))


class Option(NamedTuple):
    """A field as a command's option.

    kind : bool, int, float, str, Path, list (repeated options), or tuple (numbers separated by commas)
    item : type of the elements of a list or tuple
    choices : all legal values, where they are words
    """

    name: str
    kind: type
    item: type
    default: Any
    optional: bool
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    above: float | None
    below: float | None
    doc: str
    smoke: Any
    flag: str
    metavar: str | None
    positional: bool
    panel: str

    @property
    def legal_range(self) -> str:
        """The legal range in words."""
        words = {"at least": self.low, "more than": self.above, "at most": self.high, "less than": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)

    @property
    def flags(self) -> str:
        """The option as typed on the command line."""
        return self.flag or "--" + self.name.rstrip("_").replace("_", "-")

    @property
    def names(self) -> list[str]:
        """What may be typed for the option: its flag, and a short one where it has one."""
        short = SHORT_FLAGS.get(self.flags)
        return [self.flags, *([short] if short else [])]


def options_of(kind: type[Settings]) -> Iterator[Option]:
    """The fields with help, those of settings inside these settings included."""
    for option in fields_of(kind):
        if issubclass(option.kind, Settings):
            yield from options_of(option.kind)
        elif option.doc:
            yield option


def from_options(kind: type[S], values_by_name: Mapping[str, Any], *, smoke_test: bool = False) -> S:
    """Make settings, and those inside them, from a command's options."""
    values: dict[str, Any] = {}
    for option in fields_of(kind):
        if issubclass(option.kind, Settings):
            values[option.name] = from_options(option.kind, values_by_name, smoke_test=smoke_test)
        elif option.name in values_by_name and (option.doc or option.name in INHERITED):
            values[option.name] = _from_text(option, values_by_name[option.name])
        if smoke_test and option.smoke is not MISSING:
            values[option.name] = option.smoke(values[option.name]) if callable(option.smoke) else option.smoke
    return kind(**values)


def parse_numbers(text: str, option: str, kind: type[Number], example: str) -> list[Number]:
    """The numbers of a comma-separated list, "3,7,16"; InputError names the option and gives the example."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r} is not a list of {what}; write for example {example}") from None


def numbers_text(numbers: tuple[float, ...]) -> str:
    """Numbers as they are typed for an option."""
    return ",".join(f"{number:g}" for number in numbers)


def _from_text(option: Option, value: Any) -> Any:
    """Parse numbers and words that a command line gives as text."""
    if option.choices and value is not None:
        return str(value)
    if option.kind is not tuple or not isinstance(value, str):
        return value
    if option.optional and not value:
        return None
    defaults = option.default or ()
    example = numbers_text(defaults) if len(defaults) > 1 else NUMBERS_EXAMPLE[option.item]
    return tuple(parse_numbers(value, option.flags, option.item, example))


def fields_of(kind: type[Settings]) -> tuple[Option, ...]:
    """All fields of settings, in their order."""
    hints = typing.get_type_hints(kind)
    return tuple(_option(field, hints[field.name], _panel(kind, field.name)) for field in dataclasses.fields(kind))


def _panel(kind: type[Settings], name: str) -> str:
    """Name the panel of a field: that of output, or that of the class which adds the field."""
    adds = next(base for base in reversed(kind.__mro__) if name in vars(base).get("__annotations__", ()))
    return OUTPUT if name in OUTPUT_NAMES else str(vars(adds).get("panel", Settings.panel))


def _option(field: dataclasses.Field[Any], hint: Any, panel: str) -> Option:
    choices: tuple[str, ...] = ()
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)  # X | None
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        hint, choices = str, typing.get_args(hint)
    item = (*typing.get_args(hint), str)[0]
    kind = typing.get_origin(hint) or hint
    factory = field.default_factory
    default = factory() if kind is list and factory is not MISSING else field.default
    return Option(field.name, kind, item, default, optional, choices, panel=panel, **field.metadata)


def _check(owner: str, option: Option, value: Any) -> None:
    if option.optional and value is None:
        return
    if option.choices and value not in option.choices:
        raise InputError(f"{option.name}={value!r} of {owner} is unknown; choose one of {', '.join(option.choices)}")
    legal = (
        (option.low is None or value >= option.low)  # NaN is nowhere
        and (option.above is None or value > option.above)
        and (option.high is None or value <= option.high)
        and (option.below is None or value < option.below)
    )
    if not legal:
        raise InputError(f"{option.name}={value} of {owner} is out of range; give {option.legal_range}")
