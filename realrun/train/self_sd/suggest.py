"""Suggest the next set of sublayers to skip, by Optuna's tree-structured Parzen estimator.

A suggestion depends only on the seed and the trials so far, so that a killed search continues as if it had not been
killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from realrun.lm.variants import NOTHING, SkippedSublayers
from specsim.io.errors import InputError
from specsim.learn.search import tpe_sampler

if TYPE_CHECKING:
    import optuna

ATTEMPTS = 20  # at a set that was not tried before


class Sublayer(NamedTuple):
    """part : "attention" or "mlp"; layer : from 0"""

    part: str
    layer: int

    @property
    def key(self) -> str:
        """Name the sublayer for the estimator."""
        return f"{self.part}.{self.layer}"


def sublayers(layers: int, keep_ends: int) -> list[Sublayer]:
    """List the sublayers that may be skipped: all but those of `keep_ends` layers at either end."""
    free = range(keep_ends, layers - keep_ends)
    if not free:
        raise InputError(
            f"keep_ends={keep_ends} leaves none of {layers} layers to skip; keep at most {(layers - 1) // 2}"
        )
    return [Sublayer(part, layer) for part in ("attention", "mlp") for layer in free]


def suggest(choices: Sequence[Sublayer], trials: Sequence[Mapping[str, Any]], seed: int) -> SkippedSublayers:
    """Suggest the next set, after trials with "attention", "mlp" and a "value" to maximise.

    The first sets are the attention, the MLPs, and both, of every other layer; the estimator suggests the others. If it
    repeats a tried set, it is asked again, and after ATTEMPTS times sublayers of the set are changed at random until it
    is new. The empty set is never suggested. A set is repeated only after all sets have been tried.
    """
    tried = {NOTHING, *(_skips_of(trial) for trial in trials)}
    for skips in _probes(choices):
        if skips not in tried:
            return skips
    import optuna  # takes a second to import

    study = optuna.create_study(direction="maximize", sampler=tpe_sampler(seed, len(trials)))
    study.add_trials([stored(choices, trial) for trial in trials])
    for _ in range(ATTEMPTS):
        asked = study.ask(_distributions(choices))
        skips = _chosen([choice for choice in choices if asked.params[choice.key]])
        study.tell(asked, state=optuna.trial.TrialState.FAIL)
        if skips not in tried:
            return skips
    rng = np.random.default_rng((seed, len(trials)))
    skipped = {choice for choice in choices if choice.layer in getattr(skips, choice.part)}
    while skips in tried and len(tried) < 2 ** len(choices):
        skipped ^= {choices[int(rng.integers(len(choices)))]}
        skips = _chosen(sorted(skipped))
    return skips


def stored(choices: Sequence[Sublayer], trial: Mapping[str, Any]) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna stores it, whole in its attributes."""
    import optuna

    params = {choice.key: int(choice.layer in trial[choice.part]) for choice in choices}
    return optuna.trial.create_trial(
        params=params, distributions=_distributions(choices), value=trial["value"], user_attrs=dict(trial)
    )


def _distributions(choices: Sequence[Sublayer]) -> dict[str, optuna.distributions.BaseDistribution]:
    import optuna

    return {choice.key: optuna.distributions.CategoricalDistribution((0, 1)) for choice in choices}


def _probes(choices: Sequence[Sublayer]) -> list[SkippedSublayers]:
    other = [choice for choice in choices if choice.layer % 2]
    attention, mlp = ([choice for choice in other if choice.part == part] for part in ("attention", "mlp"))
    return [_chosen(attention), _chosen(mlp), _chosen(other)]


def _chosen(choices: Sequence[Sublayer]) -> SkippedSublayers:
    return SkippedSublayers(*(frozenset(c.layer for c in choices if c.part == part) for part in ("attention", "mlp")))


def _skips_of(trial: Mapping[str, Any]) -> SkippedSublayers:
    return SkippedSublayers(frozenset(trial["attention"]), frozenset(trial["mlp"]))
