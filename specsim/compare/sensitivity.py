"""Sensitivity to each setting: vary it over its search range, the others as they are tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specsim.io.errors import InputError
from specsim.learn.evaluate import MAX_TRUNCATED_SHARE
from specsim.learn.fit import fit
from specsim.learn.space import Axis, recorded_limits, search_space
from specsim.policy.base import Policy, Variant
from specsim.replaying.priced import PricedTrace

POINTS = 25  # values of a setting that is a float
MAX_WHOLE_VALUES = 32  # whole numbers that are all tried
NEAR = 0.01  # speedups that differ by less are as good as equal


@dataclass(frozen=True)
class Sweep:
    """Speedups over the values of a setting.

    tuned : the setting's own value, where `at_tuned` was reached
    truncated : values left out, because the recorded trees are too small to judge them
    """

    label: str
    policy: str
    setting: str
    values: list[Any]
    speedups: list[float]
    tuned: Any
    at_tuned: float
    log: bool
    truncated: list[Any]

    @property
    def spread_percent(self) -> float:
        """How much slower the worst value is than the best, in percent of the best."""
        speedups = [*self.speedups, self.at_tuned]
        return 100 * (1 - min(speedups) / max(speedups))

    @property
    def near_best(self) -> list[Any]:
        """The values within 1 % of the best speedup, in the order of the search range."""
        best = max([*self.speedups, self.at_tuned])
        return [v for v, speedup in zip(self.values, self.speedups, strict=True) if speedup >= (1 - NEAR) * best]

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "spread_percent": self.spread_percent, "near_best": self.near_best}


def swept_settings(kind: type[Policy], variant: Variant) -> list[str]:
    """The settings to vary: searched settings of a tuned variant, or of the first variant where none is tuned."""
    candidates = [form for form in kind.variants if form.tuned] or list(kind.variants[:1])
    if variant not in candidates:
        return []
    fields = dataclasses.fields(kind)
    return [field.name for field in fields if field.metadata["tune"] and field.name not in variant.fixed]


def sweep(
    label: str,
    policy: Policy,
    setting: str,
    train: PricedTrace,
    speedup: Callable[[Policy], tuple[float, float]],
) -> Sweep:
    """Sweep a setting of the policy over its search range, where trace and costs serve it.

    speedup : a policy's speedup, and the share of its rounds that asked for more than the recorded trees hold

    What a policy learned from data (its table settings) is learned anew on `train` for every value.
    """
    kind = type(policy)
    own = {key: value for key, value in policy.settings.items() if not isinstance(value, tuple)}
    axis = next(axis for axis in search_space(kind, {}, recorded_limits(train)).axes if axis.name == setting)
    judged: list[tuple[Any, float]] = []
    truncated: list[Any] = []
    for value in search_values(axis):
        with suppress(InputError):  # a value that trace or costs cannot serve
            reached, truncated_share = speedup(fit(kind, {**own, setting: value}, train.trace, train.table()))
            if truncated_share > MAX_TRUNCATED_SHARE:
                truncated.append(value)
            else:
                judged.append((value, reached))
    return Sweep(
        label=label,
        policy=kind.name,
        setting=setting,
        values=[value for value, _ in judged],
        speedups=[reached for _, reached in judged],
        tuned=own[setting],
        at_tuned=speedup(policy)[0],
        log=axis.log,
        truncated=truncated,
    )


def search_values(axis: Axis) -> list[Any]:
    """Values over the search range: all of a choice or a few whole numbers, else an even grid."""
    return list(axis.values) if axis.values is not None and len(axis.values) <= MAX_WHOLE_VALUES else axis.even(POINTS)
