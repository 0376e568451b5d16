"""Optuna's tree-structured Parzen estimator, asked for several points at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.errors import InputError
from specsim.tuning.journal import Line
from specsim.tuning.space import Axis, Space
from specsim.tuning.trials import SearchContext, ranked

if TYPE_CHECKING:
    import optuna

BATCH = 8  # points asked for together, whatever the number of threads, so that the answer does not depend on it


def search_optuna(task: SearchContext, space: Space, points: int, seed: int) -> None:
    """Try the defaults, then what the estimator proposes, `points` in all.

    The sampler is seeded anew for every batch from (seed, points so far): a search that goes
    on from its journal proposes what it would have proposed without the interruption.
    """
    import optuna  # takes a second to import, and a replay does not need it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize")
    distributions = {axis.name: _distribution(axis) for axis in space.axes}
    totals: list[float | None] = []
    while len(totals) < points:
        count = min(BATCH, points - len(totals))

        def find(done: int = len(totals), count: int = count) -> Line:
            study.sampler = _sampler(seed, done)
            batch = [space.default] if done == 0 else []
            asked = [study.ask(distributions) for _ in range(count - len(batch))]
            batch += [trial.params for trial in asked]
            for trial in asked:  # told below, from the journal's line, as after an interruption
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return {"points": batch, "seconds": task.totals(batch)}

        line = task.batch(find, count)
        for point, seconds in zip(line["points"], line["seconds"], strict=True):
            state = optuna.trial.TrialState.PRUNED if seconds is None else optuna.trial.TrialState.COMPLETE
            try:
                trial = optuna.trial.create_trial(params=point, distributions=distributions, value=seconds, state=state)
            except (ValueError, TypeError) as error:
                raise InputError(f"a point of the search's journal is damaged ({error}); delete the journal") from None
            study.add_trial(trial)  # a refused point counts as worse than all others
        totals += line["seconds"]
        task.trials.points += line["points"]
        task.trials.ranking = ranked(totals)
        task.trials.replayed_rows += task.rows * len(line["points"])
        task.progress(len(totals), points)


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
