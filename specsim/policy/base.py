"""Base of all policies: frozen settings and a few small pure functions, shown here for a chain policy.

The functions are module-level numba functions of plain numbers, so the replay kernel
compiles them in and the real run calls the very same ones:

    initial_state(params) -> state
    keep_drafting(state, params, step, depth, u) -> (bool, state)
    update(state, params, drafted, accepted) -> state

`params` holds the settings by name, such as `params.gamma`: numbers as floats, a choice as its
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
from collections.abc import Callable, Iterable, Mapping
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
Settings = Mapping[str, Any]  # values of a policy's settings, by name
Reads = Literal["nothing", "distribution", "drawn token"]
DRAWN = frozenset({"prob", "tree"})  # trace columns of the drafted tokens' own probabilities
DISTRIBUTION = frozenset({"confidence", "entropy_nats", "top10_confidence", "score"})  # known before a token is drawn
BIASED = (
    "drops drafted tokens by what was drawn, which changes the output's distribution if drafts are sampled; "
    "use --mode greedy-draft"
)


def reads_of(features: Iterable[str]) -> Reads:
    """Which part of a drafter these trace columns are: its distributions, or the tokens drawn from them as well.

    Greedy drafts follow from the distributions. A sampled draft is kept with min(1, p / q), which gives a sample of p
    only if the decision to verify it was made without it (Leviathan et al. 2023). So whatever is read may decide when
    to stop drafting, but only the distribution may decide that a drafted token is not verified.
    """
    seen = frozenset(features)
    return "drawn token" if seen & DRAWN else "distribution" if seen & DISTRIBUTION else "nothing"


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
    """A variant of a policy in comparisons: fixed settings, and whether the others are tuned."""

    label: str
    fixed: Settings = dataclasses.field(default_factory=dict)
    tuned: bool = True


@cache
def params_class(kind: type[Policy]) -> Any:
    """Make a NamedTuple with a field per setting of this kind, in their order.

    It is the kind's attribute `Params`, by which compiled code on disk names it. A subclass that adds no setting shares
    its parent's NamedTuple and compiled code.
    """
    names, parent = [field.name for field in dataclasses.fields(kind)], kind.__bases__[0]
    if issubclass(parent, Policy) and names and names == [field.name for field in dataclasses.fields(parent)]:
        return parent.Params
    params: Any = namedtuple(f"{kind.__name__}Params", names)  # type: ignore[misc]
    params.__module__, params.__qualname__ = kind.__module__, f"{kind.__qualname__}.Params"
    return params


class _Params:
    """The attribute `Params` of a kind of policy, made on first access because the decorator adds fields late."""

    def __get__(self, policy: Policy | None, kind: type[Policy]) -> Any:
        return params_class(kind)  # type: ignore[arg-type]  # a class hashes well


@dataclass(frozen=True)
class Policy:
    """Base of every policy. Subclasses are frozen dataclasses of `setting` fields."""

    name: ClassVar[str]
    source: ClassVar[str]  # paper and equation
    features: ClassVar[tuple[str, ...]] = ()  # trace columns that the policy reads; see `reads_of`
    drafter_kinds: ClassVar[tuple[str, ...]] = ()  # kinds of drafter that it suits; empty: all
    variants: ClassVar[tuple[Variant, ...]] = (Variant("tuned"),)  # in leaderboards and validations
    functions: ClassVar[tuple[str, ...]]  # names of the compiled functions
    initial_state: ClassVar[Callable[..., Any]]
    update: ClassVar[Callable[..., Any]]
    Params = _Params()  # without an annotation, which would make it a field

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_setting(self.name, field, getattr(self, field.name))

    @classmethod
    def fit(cls, settings: Settings, train: Trace, table: CostTable) -> Self:
        """Make the policy with these settings, and fit its other settings to data and costs if it learns."""
        return build_policy(cls, settings)

    def cost(self, model: CostModel) -> CostModel:
        """Return the cost model of this policy's rounds; by default the given model."""
        return model

    @classmethod
    def unsearched(cls, trace: Trace) -> Settings:
        """Return values of settings that have no effect on this trace, so that they are not searched."""
        return {}

    @property
    def max_draft_tokens(self) -> int:
        """Longest path that this policy can draft, in tokens."""
        raise NotImplementedError

    @property
    def carries_state(self) -> bool:
        """Whether the state is kept from sequence to sequence."""
        return False

    @classmethod
    def biases_sampled_drafts(cls) -> bool:
        """Whether the output is no sample of the target where drafts are sampled; see `reads_of`."""
        return False

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


def build_policy(kind: type[Kind], settings: Settings) -> Kind:
    """Make a policy from settings given as values or as text (the command line's).

    Raises InputError for an unknown setting, or a value of the wrong type or out of range.
    """
    return kind(**parse_settings(kind, settings))


def parse_settings(kind: Any, settings: Settings) -> dict[str, Any]:
    """Parse settings of a dataclass with a name, whose `setting` fields they are; InputError for an unknown one."""
    known = {field.name: field for field in dataclasses.fields(kind) if "tune" in field.metadata}
    values: dict[str, Any] = {}
    for key, raw in settings.items():
        if key not in known:
            raise InputError(f"policy {kind.name} has no setting {key!r}; known: {', '.join(known)}")
        values[key] = _parse(kind.name, key, raw, type(known[key].default))
    return values


def _parse(policy: str, key: str, raw: Any, kind: type) -> Any:
    """Parse a value of this kind from text; other values are unchanged, except lists, which become tuples."""
    if kind is tuple and isinstance(raw, list):  # JSON has no tuples
        return tuple(raw)
    if not isinstance(raw, str) or kind is str:
        return raw
    if kind is bool:
        if raw.lower() in ("true", "false", "0", "1"):
            return raw.lower() in ("true", "1")
        raise InputError(f"policy {policy}: {key}={raw!r}; expected {_WANTED[kind]}")
    try:
        return tuple(float(part) for part in raw.split(",")) if kind is tuple else kind(raw)
    except ValueError:
        raise InputError(f"policy {policy}: {key}={raw!r}; expected {_WANTED[kind]}") from None


_WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a word",
    tuple: "a list of numbers, comma-separated",
}


def check_setting(policy: str, field: dataclasses.Field[Any], value: Any) -> None:
    """Raise InputError unless this value is legal for this setting."""
    kind, low, high = type(field.default), field.metadata["low"], field.metadata["high"]
    if not _is_a(kind, value):
        raise InputError(f"policy {policy}: {field.name}={value!r}; expected {_WANTED[kind]}")
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
    """Tell whether a value has the type of a setting of this kind; NumPy's numbers are numbers."""
    if kind is tuple:
        return isinstance(value, tuple) and len(value) > 0 and all(_is_a(float, number) for number in value)
    if kind in (bool, str):
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Integral if kind is int else numbers.Real)


def _number(field: dataclasses.Field[Any], value: Any) -> Any:
    """Convert a setting to what the compiled functions read."""
    if isinstance(value, tuple):
        return np.array(value, dtype=np.float64)
    return float(field.metadata["choices"].index(value) if isinstance(value, str) else value)
