"""What a chain policy is: frozen settings and three small pure functions.

The functions are module-level numba functions of plain numbers, so the replay kernel
compiles them in and the real run calls the very same ones:

    initial_state(params) -> state
    keep_drafting(state, params, step, depth, u) -> bool
    update(state, params, drafted, accepted) -> state

`params` is the tuple of the settings as floats in field order; `state` is a tuple of
floats; `step` describes the token just drafted, the `depth`-th of its round (from 1);
`u` is a uniform in (0, 1) that belongs to this place alone.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from specsim.errors import InputError


class Step(NamedTuple):
    """What is known about the token just drafted."""

    prob: float  # draft probability of the drafted token
    confidence: float  # largest draft probability
    entropy_nats: float  # entropy of the draft distribution
    score: float  # acceptance predictor's output, where the drafter has one


def setting(
    default: Any,
    low: float,
    high: float,
    *,
    tune: tuple[float, float] | None = None,
    log: bool = False,
    doc: str = "",
) -> Any:
    """A dataclass field with its legal range and, if it is tuned, its search range."""
    metadata = {"low": low, "high": high, "tune": tune, "log": log, "doc": doc}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ChainPolicy:
    """Base of every chain policy. Subclasses are frozen dataclasses of `setting` fields."""

    name: ClassVar[str]
    source: ClassVar[str]  # paper and equation
    features: ClassVar[tuple[str, ...]] = ()  # trace columns that keep_drafting reads
    initial_state: ClassVar[Callable[..., Any]]
    keep_drafting: ClassVar[Callable[..., Any]]
    update: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low, high = getattr(self, field.name), field.metadata["low"], field.metadata["high"]
            if not _is_a(type(field.default), value):
                wanted = _WANTED[type(field.default)]
                raise InputError(f"policy {self.name}: {field.name}={value!r} is not {wanted}; give one")
            if not low <= value <= high:  # also catches NaN
                raise InputError(
                    f"policy {self.name}: {field.name}={value} is outside [{low:g}, {high:g}]; choose a value inside"
                )

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft this policy can ask for, in tokens."""
        return int(self.settings["max_draft"])

    @property
    def params(self) -> tuple[float, ...]:
        """The settings as the compiled functions see them."""
        return tuple(float(getattr(self, field.name)) for field in dataclasses.fields(self))

    @property
    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.metadata["tune"]:
                parts.append(f"{field.name}={value:.3g}" if isinstance(value, float) else f"{field.name}={value}")
        return f"{self.name}({', '.join(parts)})"


def build_policy(kind: type[ChainPolicy], settings: Mapping[str, Any]) -> ChainPolicy:
    """Make a policy from settings given as values or as text (the command line's).

    Raises InputError for an unknown setting, a value that is no number, or a value out
    of range.
    """
    known = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, raw in settings.items():
        if key not in known:
            raise InputError(f"policy {kind.name} has no setting {key!r}; known: {', '.join(known)}")
        values[key] = _parse(kind.name, key, raw, type(known[key].default))
    return kind(**values)


def _parse(policy: str, key: str, raw: Any, kind: type) -> Any:
    if not isinstance(raw, str):
        return raw
    if kind is bool:
        if raw.lower() in ("true", "false", "0", "1"):
            return raw.lower() in ("true", "1")
        raise InputError(f"policy {policy}: {key}={raw!r} is not {_WANTED[kind]}; give one")
    try:
        return kind(raw)
    except ValueError:
        raise InputError(f"policy {policy}: {key}={raw!r} is not {_WANTED[kind]}; give one") from None


_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value can serve as a setting of this kind; numpy's numbers count."""
    if kind is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral if kind is int else numbers.Real)
