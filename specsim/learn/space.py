"""The search space of a policy: its settings with a search range that are not fixed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.io.errors import InputError
from specsim.policy.base import Policy, Settings, build_policy

if TYPE_CHECKING:
    from specsim.replaying.priced import PricedTrace

APART = 0.1  # floats this share of their range apart count as different settings


@dataclass(frozen=True)
class Axis:
    """One setting. values : all that it may be, in order; None for a float between low and high."""

    name: str
    default: Any
    low: float
    high: float
    log: bool
    values: Sequence[Any] | None

    def around(self, value: Any) -> Axis:
        """Return the axis with this default, moved into the range."""
        if self.values is None or isinstance(self.values, range):
            value = min(max(value, self.low), self.high)
        return dataclasses.replace(self, default=value)

    def at(self, share: float) -> Any:
        """Return the value at this share of the range, in [0, 1]; countable values get equal parts."""
        if self.values is not None and not (self.log and isinstance(self.values, range)):
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        value = min(max(value, self.low), self.high)
        return float(value) if self.values is None else round(value)

    def even(self, points: int) -> list[Any]:
        """At most `points` values spread evenly, ends included; a single value is the default."""
        if points == 1:
            return [self.default]
        if self.values is None or self.log:
            spread = [self.at(share) for share in np.linspace(0, 1, points).tolist()]
        else:
            index = np.linspace(0, len(self.values) - 1, min(len(self.values), points)).round().astype(int)
            spread = [self.values[i] for i in index.tolist()]
        return list(dict.fromkeys(spread))

    def apart(self, a: Any, b: Any) -> bool:
        """Tell whether two values differ clearly."""
        if self.values is not None:
            return bool(a != b)
        if self.log:
            return abs(math.log(a / b)) >= APART * math.log(self.high / self.low)
        return bool(abs(a - b) >= APART * (self.high - self.low))


@dataclass(frozen=True)
class Space:
    """The settings to search; without any, the space has a single point."""

    axes: tuple[Axis, ...]

    @property
    def default(self) -> Settings:
        """The policy's defaults, moved into the ranges."""
        return {axis.name: axis.default for axis in self.axes}

    def around(self, settings: Settings) -> Space:
        """Return the space with these settings, moved into the ranges, as defaults."""
        return Space(tuple(axis.around(settings[axis.name]) for axis in self.axes))

    @property
    def size(self) -> float:
        """Points in all; infinite with a float."""
        return math.prod(math.inf if axis.values is None else len(axis.values) for axis in self.axes)

    def grid(self, points: int) -> list[Settings]:
        """Return an even grid of at most `points`; longer axes get the points that shorter axes cannot use."""
        order = sorted(self.axes, key=lambda axis: math.inf if axis.values is None else len(axis.values))
        room, values = points, {}
        for left, axis in zip(range(len(order), 0, -1), order, strict=True):
            values[axis.name] = axis.even(max(1, int(room ** (1 / left) + 1e-9)))
            room = max(1, room // len(values[axis.name]))
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, point, strict=True)) for point in itertools.product(*(values[n] for n in names))]

    def sobol(self, points: int, seed: int) -> list[Settings]:
        """Return the defaults, then points of a scrambled Sobol sequence; each once, at most `points`."""
        from scipy.stats import qmc  # slow to import

        if not self.axes:
            return [{}]
        sampler = qmc.Sobol(len(self.axes), scramble=True, seed=seed)
        shares = sampler.random_base2(max(1, math.ceil(math.log2(points))))
        drawn = [{axis.name: axis.at(u) for axis, u in zip(self.axes, row, strict=True)} for row in shares.tolist()]
        distinct = {tuple(point.values()): point for point in reversed([self.default, *drawn])}
        return list(distinct.values())[::-1][:points]

    def apart(self, a: Settings, b: Settings) -> bool:
        """Tell whether two points differ clearly in any setting."""
        return any(axis.apart(a[axis.name], b[axis.name]) for axis in self.axes)


Limits = Mapping[str, int]  # of what a setting `bounds`: depth (tokens), and of trees width (children) and nodes


def recorded_limits(priced: PricedTrace) -> Limits:
    """Return the deepest and widest drafts that a trace holds, and the most nodes that it and its costs do."""
    trace = priced.trace
    if trace.tree is None:
        return {"depth": trace.depth}
    covered = priced.cost.max_tree_tokens - 1  # the pending token is verified as well
    nodes = min(trace.tree.nodes, covered) if covered > 0 else trace.tree.nodes
    return {"depth": trace.depth, "width": trace.tree.width, "nodes": nodes}


def search_space(kind: type[Policy], fixed: Settings, limits: Limits) -> Space:
    """Return the settings with a `tune` range that are not fixed; those that bound a draft stay within the limits."""
    return Space(tuple(_axis(kind, field, fixed, limits) for field in tuned_fields(kind) if field.name not in fixed))


def tuned_fields(kind: type[Policy]) -> list[dataclasses.Field[Any]]:
    """The settings that the policy declares a search range for."""
    return [field for field in dataclasses.fields(kind) if field.metadata["tune"]]


def cap_depth(kind: type[Any], depth: int) -> Settings:
    """Settings that bound the depth of a draft and whose defaults exceed the recorded depth, cut to it."""
    return within(kind, {"depth": depth})


def within(kind: type[Any], limits: Limits) -> Settings:
    """Return the settings that bound a draft and whose defaults exceed the limits, at the limits."""
    return {name: most for name, most in bounded(kind, limits).items() if getattr(kind, name) > most}


def bounded(kind: type[Any], limits: Limits) -> dict[str, int]:
    """Return the settings that bound what has a limit, and that limit."""
    bounds = {field.name: field.metadata.get("bounds") or "" for field in dataclasses.fields(kind)}
    return {name: limits[bound] for name, bound in bounds.items() if bound in limits}


def smaller_trees(kind: type[Policy], space: Space, point: Settings) -> list[Settings]:
    """Return the point with ever smaller trees, each a half of the one before.

    First of ever fewer nodes, then of fewer children of a node as well, down to the ends of the ranges.
    """
    low = {axis.name: int(axis.low) for axis in space.axes if isinstance(axis.values, range)}
    smaller: list[Settings] = []
    for bound in ("nodes", "width"):
        names = [name for name in bounded(kind, {bound: 0}) if name in low]
        while any(point[name] > low[name] for name in names):
            point = {**point, **{name: max(low[name], point[name] // 2) for name in names}}
            smaller.append(point)
    return smaller


def _axis(kind: type[Policy], field: dataclasses.Field[Any], fixed: Settings, limits: Limits) -> Axis:
    name, default, log = field.name, field.default, bool(field.metadata["log"])
    if isinstance(default, bool):
        return Axis(name, default, 0, 1, False, (False, True))
    if isinstance(default, str):
        choices = tuple(field.metadata["choices"])
        return Axis(name, default, 0, len(choices) - 1, False, choices)
    low, high = field.metadata["tune"]
    if not isinstance(default, int):
        return Axis(name, default, low, high, log, None).around(default)
    of_trees = {bound: most for bound, most in limits.items() if bound != "depth"}  # depth is that of the whole policy
    low, high = int(low), min(int(high), bounded(kind, of_trees).get(name, int(high)))
    others = {**within(kind, limits), **fixed}
    high = next((v for v in range(high, low, -1) if _fits(kind, {**others, name: v}, limits["depth"])), low)
    low = min(low, high)
    return Axis(name, default, low, high, log, range(low, high + 1)).around(default)


def _fits(kind: type[Policy], settings: Settings, depth: int) -> bool:
    try:
        return build_policy(kind, settings).max_draft_tokens <= depth
    except InputError:
        return False
