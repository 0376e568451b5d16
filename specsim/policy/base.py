"""What a policy is: frozen settings and a few small pure functions; here those of a chain policy.

The functions are module-level numba functions of plain numbers, so the replay kernel
compiles them in and the real run calls the very same ones:

    initial_state(params) -> state
    keep_drafting(state, params, step, depth, u) -> (bool, state)
    update(state, params, drafted, accepted) -> state

`params` holds the settings by name, as `params.gamma`: numbers as floats, a choice as its
index, a table as a float64 array; `state` is a tuple of floats; `step` describes the token
just drafted, the `depth`-th of its round (from 1); `u` is a uniform in (0, 1) that belongs
to this place alone (`specsim.io.rng.split` makes more of it). What a round must
remember, keep_drafting puts into the state it returns; at depth 1 it starts afresh. `drafted` counts
the tokens that were verified: all, unless the policy drops some (`ChainPolicy.drops_refused`).
"""

from __future__ import annotations

import dataclasses
import numbers
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np

from specsim.io.errors import InputError

if TYPE_CHECKING:
    from specsim.cost.model import CostModel
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace

Kind = TypeVar("Kind", bound="Policy")


def setting(
    default: Any,
    low: float = 0.0,
    high: float = 0.0,
    *,
    tune: tuple[float, float] | None = None,
    log: bool = False,
    choices: tuple[str, ...] | None = None,
    bounds: Literal["depth", "width", "nodes"] | None = None,
    doc: str = "",
) -> Any:
    """A setting of a policy: a dataclass field with its legal range or choices and its search range.

    Parameters
    ----------
    default : bool, int, float, str or tuple of floats
        Its type is the setting's: a str is one of `choices`, a tuple a fitted table.
    low, high : float
        Legal range, ends included; of every number of a table.
    tune : (float, float), optional
        Search range, where the setting is tuned; of a choice, anything.
    log : bool
        Search on a logarithmic scale.
    choices : tuple of str, optional
        Legal values of a str.
    bounds : {"depth", "width", "nodes"}, optional
        The setting bounds how deep a draft is, in tokens, how many children a node of a tree has, or how many nodes are
        verified, so searches lower it to what a trace was recorded with.
    doc : str
        What the setting is, with its unit, for `specsim policies`.

    Returns
    -------
    dataclasses.Field

    Examples
    --------
    >>> import dataclasses, specsim
    >>> @dataclasses.dataclass(frozen=True)
    ... class Settings:
    ...     floor: float = specsim.setting(0.3, 0.0, 1.0, tune=(0.05, 0.95), doc="least probability")
    >>> Settings().floor
    0.3
    """
    metadata = {"low": low, "high": high, "tune": tune, "log": log, "choices": choices, "bounds": bounds, "doc": doc}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Variant:
    """A form in which a policy enters comparisons: settings that are fixed, the others tuned or left alone."""

    label: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tuned: bool = True


@cache
def params_class(kind: type[Policy]) -> Any:
    """A NamedTuple with a field per setting of this kind, in their order.

    It is found again as the kind's own attribute `Params`, under which compiled code kept on disk names it. A subclass
    that adds no setting has its parent's, and so its compiled code.
    """
    names, parent = [field.name for field in dataclasses.fields(kind)], kind.__bases__[0]
    if issubclass(parent, Policy) and names and names == [field.name for field in dataclasses.fields(parent)]:
        return parent.Params
    made: Any = namedtuple(f"{kind.__name__}Params", names)  # type: ignore[misc]
    made.__module__, made.__qualname__ = kind.__module__, f"{kind.__qualname__}.Params"
    return made


class _Params:
    """The attribute `Params` of a kind of policy: made when first asked for, as a decorator adds the fields late."""

    def __get__(self, policy: Policy | None, kind: type[Policy]) -> Any:
        return params_class(kind)  # type: ignore[arg-type]  # a class hashes well


@dataclass(frozen=True)
class Policy:
    """Base of every policy. Subclasses are frozen dataclasses of `setting` fields."""

    name: ClassVar[str]
    source: ClassVar[str]  # paper and equation
    features: ClassVar[tuple[str, ...]] = ()  # trace columns that the policy reads
    drafter_kinds: ClassVar[tuple[str, ...]] = ()  # kinds of drafter that it is meant for; none: any
    variants: ClassVar[tuple[Variant, ...]] = (Variant("tuned"),)  # how leaderboard and validation take it
    functions: ClassVar[tuple[str, ...]]  # names of the compiled functions
    initial_state: ClassVar[Callable[..., Any]]
    update: ClassVar[Callable[..., Any]]
    Params = _Params()  # of no annotation, or it would be a field

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(self.name, field, getattr(self, field.name))

    @classmethod
    def fit(cls, settings: Mapping[str, Any], train: Trace, table: CostTable) -> Self:
        """The policy with these settings and, where it has such, what it learns from data and costs."""
        return build_policy(cls, settings)

    def cost(self, model: CostModel) -> CostModel:
        """What rounds cost where this policy decides their shape; here, as the model says."""
        return model

    @classmethod
    def unsearched(cls, trace: Trace) -> dict[str, Any]:
        """Settings that decide nothing on this trace, and so need no search, at some value."""
        return {}

    @property
    def max_draft_tokens(self) -> int:
        """Longest path that this policy can ask for, in tokens."""
        raise NotImplementedError

    @property
    def carries_state(self) -> bool:
        """Whether the state lives on from sequence to sequence."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether rounds change later decisions: whether `update` does anything."""
        return True

    @property
    def params(self) -> Any:
        """The settings as the compiled functions see them, by name."""
        return self.Params(*(_number(field, getattr(self, field.name)) for field in dataclasses.fields(self)))

    @property
    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                continue  # fitted tables are long
            if value != field.default or field.metadata["tune"]:
                parts.append(f"{field.name}={value:.3g}" if isinstance(value, float) else f"{field.name}={value}")
        return f"{self.name}({', '.join(parts)})"


def build_policy(kind: type[Kind], settings: Mapping[str, Any]) -> Kind:
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
    """A value of this kind from text; what is no text is left as it is, but for a table's type."""
    if kind is tuple and isinstance(raw, list):  # JSON has no tuples
        return tuple(raw)
    if not isinstance(raw, str) or kind is str:
        return raw
    if kind is bool:
        if raw.lower() in ("true", "false", "0", "1"):
            return raw.lower() in ("true", "1")
        raise InputError(f"policy {policy}: {key}={raw!r} is not {_WANTED[kind]}; give one")
    try:
        return tuple(float(part) for part in raw.split(",")) if kind is tuple else kind(raw)
    except ValueError:
        raise InputError(f"policy {policy}: {key}={raw!r} is not {_WANTED[kind]}; give one") from None


_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    tuple: "a list of numbers, comma-separated",
}


def _check(policy: str, field: dataclasses.Field[Any], value: Any) -> None:
    """InputError unless this value may be this setting's."""
    kind, low, high = type(field.default), field.metadata["low"], field.metadata["high"]
    if not _is_a(kind, value):
        raise InputError(f"policy {policy}: {field.name}={value!r} is not {_WANTED[kind]}; give one")
    if kind is str:
        if value not in field.metadata["choices"]:
            known = ", ".join(field.metadata["choices"])
            raise InputError(f"policy {policy}: {field.name}={value!r} is unknown; known: {known}")
        return
    for number in value if kind is tuple else (value,):
        if not low <= number <= high:  # also catches NaN
            raise InputError(
                f"policy {policy}: {field.name}={number} is outside [{low:g}, {high:g}]; choose a value inside"
            )


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value can serve as a setting of this kind; numpy's numbers count."""
    if kind is tuple:
        return isinstance(value, tuple) and len(value) > 0 and all(_is_a(float, number) for number in value)
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral if kind is int else numbers.Real)


def _number(field: dataclasses.Field[Any], value: Any) -> Any:
    """A setting as the compiled functions see it."""
    if isinstance(value, tuple):
        return np.array(value, dtype=np.float64)
    return float(field.metadata["choices"].index(value) if isinstance(value, str) else value)
