"""Optuna's tree-structured Parzen estimator, asked for several points at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.io.errors import InputError
from specsim.learn.journal import Line
from specsim.learn.search_state import SearchState
from specsim.learn.space import Axis, Settings, Space

if TYPE_CHECKING:
    import optuna

BATCH = 8  # points asked for together, whatever the number of threads, so that the answer does not depend on it


def search_optuna(state: SearchState, space: Space, trials: int, seed: int) -> None:
    """Try the defaults, then what the estimator proposes, `trials` points in all.

    The sampler is seeded anew for every batch from (seed, points so far): a search that goes on from its journal
    proposes what it would have proposed without the interruption.
    """
    import optuna  # takes a second to import, and a replay does not need it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize")
    distributions = {axis.name: _distribution(axis) for axis in space.axes}

    def propose(done: int, size: int) -> list[Settings]:
        study.sampler = _sampler(seed, done)
        batch = [space.default] if done == 0 else []
        asked = [study.ask(distributions) for _ in range(size - len(batch))]
        for trial in asked:  # `observe` adds it from the journal's line, as after an interruption
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return batch + [trial.params for trial in asked]

    def observe(line: Line) -> None:
        for point, seconds in zip(line["points"], line["seconds"], strict=True):
            outcome = optuna.trial.TrialState.PRUNED if seconds is None else optuna.trial.TrialState.COMPLETE
            try:
                trial = optuna.trial.create_trial(
                    params=point, distributions=distributions, value=seconds, state=outcome
                )
            except (ValueError, TypeError) as error:
                raise InputError(f"a point of the search's journal is damaged ({error}); delete the journal") from None
            study.add_trial(trial)  # a refused point counts as worse than all others

    state.replay_in_full(trials, BATCH, propose, observe)


def _sampler(seed: int, done: int) -> optuna.samplers.TPESampler:
    import optuna

    with warnings.catch_warnings():  # both options are marked experimental in some versions
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=int(np.random.SeedSequence((seed, done)).generate_state(1)[0]),
            multivariate=True,  # a threshold and its scale belong together
            constant_liar=True,  # keeps the points of a batch apart
        )


def _distribution(axis: Axis) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.values is None:
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    if isinstance(axis.values, range):
        return IntDistribution(axis.values[0], axis.values[-1], log=axis.log)
    return CategoricalDistribution(tuple(axis.values))
