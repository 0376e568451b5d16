"""Search of a policy's declared space for the largest predicted speedup."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from specsim.cost import CostModel, CostTable
from specsim.errors import InputError
from specsim.policy import ChainPolicy, build_policy
from specsim.prediction import Prediction, summarise
from specsim.replay import compile_for, replay
from specsim.trace import Trace

Search = Literal["grid", "optuna"]
Progress = Callable[[int, int], None]  # (trials done, trials in all)


@dataclass(frozen=True)
class TuneResult:
    """The best settings found, with their prediction on both parts."""

    best: ChainPolicy
    train: Prediction
    holdout: Prediction
    trials: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.best.name,
            "best_params": self.best.settings,
            "train": self.train.as_dict(),
            "holdout": self.holdout.as_dict(),
            "trials": self.trials,
        }


def tuned_fields(kind: type[ChainPolicy]) -> list[dataclasses.Field[Any]]:
    """The settings that the policy declares a search range for."""
    return [field for field in dataclasses.fields(kind) if field.metadata["tune"]]


def tune(
    kind: type[ChainPolicy],
    train: Trace,
    holdout: Trace,
    cost: CostModel,
    *,
    fixed: Mapping[str, Any] | None = None,
    search: Search | None = None,
    trials: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneResult:
    """Find the settings with the largest predicted speedup on `train`, report on `holdout`.

    fixed : settings held at a value. `max_draft` is held at the recorded depth if absent.
    search : "grid" spends at most `trials` points on an even grid; "optuna" starts from
        the policy's defaults and searches with TPE. A space of at most `trials` whole
        numbers is enumerated either way. Default: "optuna", or "grid" in a source tree
        on a machine without Optuna.
    """
    if trials < 1:
        raise InputError(f"trials={trials}; give at least 1")
    held = dict(fixed or {})
    if "max_draft" in {field.name for field in dataclasses.fields(kind)}:
        held.setdefault("max_draft", train.depth)
    build_policy(kind, held)  # names an unknown or illegal setting before any work
    free = [field for field in tuned_fields(kind) if field.name not in held]
    table = compile_for(train, cost)

    def speedup(settings: Mapping[str, Any]) -> float:
        return replay(train, build_policy(kind, {**held, **settings}), table, seed=seed).speedup

    countable = all(isinstance(field.default, int) for field in free)
    size = int(np.prod([len(_whole_numbers(field, train.depth)) for field in free])) if countable else 0
    search = search or ("optuna" if find_spec("optuna") else "grid")
    if search == "grid" or (countable and size <= trials):
        points = list(_grid(free, trials, train.depth))
        best, count = _best_of(points, speedup, progress), len(points)
    else:
        best, count = _optuna(kind, free, train.depth, speedup, trials, seed, progress), trials
    policy = build_policy(kind, {**held, **best})
    holdout_table: CostTable = compile_for(holdout, cost)
    return TuneResult(
        best=policy,
        train=summarise(replay(train, policy, table, seed=seed)),
        holdout=summarise(replay(holdout, policy, holdout_table, seed=seed)),
        trials=count,
    )


def _whole_numbers(field: dataclasses.Field[Any], depth: int) -> range:
    """Whole values of a setting; a draft length never exceeds the recorded depth."""
    low, high = field.metadata["tune"]
    return range(int(low), min(int(high), depth) + 1)


def _grid(free: list[dataclasses.Field[Any]], trials: int, depth: int) -> Iterator[dict[str, Any]]:
    """An even grid of at most `trials` points; whole numbers keep all their values if they fit."""
    per_axis = max(1, int(trials ** (1 / max(1, len(free))) + 1e-9))
    axes: list[list[Any]] = []
    for field in free:
        low, high = field.metadata["tune"]
        if isinstance(field.default, int):
            values = _whole_numbers(field, depth)
            wanted = np.linspace(0, len(values) - 1, min(len(values), per_axis)).round().astype(int)
            axes.append([values[i] for i in wanted])
        elif field.metadata["log"]:
            axes.append(np.geomspace(low, high, per_axis).tolist())
        else:
            axes.append(np.linspace(low, high, per_axis).tolist())
    names = [field.name for field in free]
    for point in itertools.product(*axes):
        yield dict(zip(names, point, strict=True))


def _best_of(
    points: list[dict[str, Any]], speedup: Callable[[Mapping[str, Any]], float], progress: Progress | None
) -> dict[str, Any]:
    scores = []
    for number, point in enumerate(points):
        scores.append(speedup(point))
        if progress:
            progress(number + 1, len(points))
    return points[int(np.argmax(scores))]


def _optuna(
    kind: type[ChainPolicy],
    free: list[dataclasses.Field[Any]],
    depth: int,
    speedup: Callable[[Mapping[str, Any]], float],
    trials: int,
    seed: int,
    progress: Progress | None,
) -> dict[str, Any]:
    import optuna  # takes a second to import, and a replay does not need it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    start = {field.name: field.default for field in free}
    for field in free:
        if isinstance(field.default, int):
            start[field.name] = min(field.default, _whole_numbers(field, depth)[-1])
    study.enqueue_trial(start)

    def objective(trial: optuna.Trial) -> float:
        settings: dict[str, Any] = {}
        for field in free:
            low, high = field.metadata["tune"]
            if isinstance(field.default, int):
                values = _whole_numbers(field, depth)
                settings[field.name] = trial.suggest_int(field.name, values[0], values[-1])
            else:
                settings[field.name] = trial.suggest_float(field.name, low, high, log=field.metadata["log"])
        return speedup(settings)

    def report(_study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if progress:
            progress(trial.number + 1, trials)

    study.optimize(objective, n_trials=trials, callbacks=[report])
    return dict(study.best_params)
