"""Suggest the next set of sublayers to skip, by Optuna's tree-structured Parzen estimator.

A suggestion depends only on the seed and the trials so far, so that a killed search continues as if it had not been
killed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from realrun.lm.variants import NOTHING, SkippedSublayers
from specsim.io.errors import InputError

if TYPE_CHECKING:
    import optuna

ATTEMPTS = 20  # at a set that was not tried before


def check_installed() -> None:
    """Raise InputError, before anything is decoded or measured, if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise InputError("the search for skipped sublayers needs Optuna, which is not installed; `pip install optuna`")


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

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=_sampler(seed, len(trials)))
    space: dict[str, optuna.distributions.BaseDistribution] = {
        choice.key: optuna.distributions.CategoricalDistribution((0, 1)) for choice in choices
    }
    for trial in trials:
        params = {choice.key: int(choice.layer in trial[choice.part]) for choice in choices}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=trial["value"]))
    for _ in range(ATTEMPTS):
        asked = study.ask(space)
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


def _probes(choices: Sequence[Sublayer]) -> list[SkippedSublayers]:
    other = [choice for choice in choices if choice.layer % 2]
    attention, mlp = ([choice for choice in other if choice.part == part] for part in ("attention", "mlp"))
    return [_chosen(attention), _chosen(mlp), _chosen(other)]


def _chosen(choices: Sequence[Sublayer]) -> SkippedSublayers:
    return SkippedSublayers(*(frozenset(c.layer for c in choices if c.part == part) for part in ("attention", "mlp")))


def _skips_of(trial: Mapping[str, Any]) -> SkippedSublayers:
    return SkippedSublayers(frozenset(trial["attention"]), frozenset(trial["mlp"]))


def _sampler(seed: int, done: int) -> optuna.samplers.TPESampler:
    import optuna

    with warnings.catch_warnings():  # the option is marked experimental in some versions
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=int(np.random.SeedSequence((seed, done)).generate_state(1)[0]),
            multivariate=True,  # the gain of skipping a sublayer depends on the others
        )
