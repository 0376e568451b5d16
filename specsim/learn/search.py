"""Search a policy's settings for the fewest seconds on a trace."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress
from specsim.learn.evaluate import MAX_TRUNCATED_SHARE, Evaluator, evaluate_many
from specsim.learn.settings import DEFAULT_SEARCH, SearchSettings
from specsim.learn.space import (
    Axis,
    Limits,
    Space,
    bounded,
    recorded_limits,
    search_space,
    smaller_trees,
    tuned_fields,
)
from specsim.learn.storage import describe_job, job_name, open_study
from specsim.policy.base import Policy, Settings, build_policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace

if TYPE_CHECKING:
    from optuna.samplers import TPESampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

BATCH = 256  # points of a grid between two reports of progress
SMALLER = "smaller"  # attribute of a trial whose trees were made smaller than proposed
ASKED = 8  # points that Optuna proposes together, whatever the threads, so that the answer does not depend on them
Propose = Callable[["Sequence[FrozenTrial]", int], list[Settings]]


@dataclass(frozen=True)
class SearchResult:
    """Best settings of a search.

    runner_up : the next best policy that differs clearly from the best; None if there is none
    trials, refused : points tried, and those of them that trace or costs cannot serve
    truncated : refused points that the recorded trees are too small for, whose speedup is unknown
    smaller : points tried with smaller trees than were proposed, the largest that are recorded
    interrupted : the search was stopped; these are the best so far
    default : the policy with its default settings; None if trace or costs cannot serve it
    fixed : settings that were not searched
    """

    best: Policy
    runner_up: Policy | None
    default: Policy | None
    fixed: Settings
    search: str
    trials: int
    refused: int
    interrupted: bool
    truncated: int = 0
    smaller: int = 0


def find_best(
    kind: type[Policy],
    train: PricedTrace,
    settings: SearchSettings = DEFAULT_SEARCH,
    *,
    progress: Counter | None = None,
) -> SearchResult:
    """Search the policy's space for the fewest seconds on this trace.

    Ctrl-C ends the search with the best so far, if there is any. Points that trace or costs cannot serve are passed
    over; if all are, the first point's InputError is raised.
    """
    trace, trials, seed = train.trace, settings.trials, settings.seed
    limits = recorded_limits(train)
    fixed = fixed_settings(kind, {**kind.unsearched(trace), **settings.fixed}, limits)
    evaluator = Evaluator(kind, train, fixed=fixed, seed=seed, jobs=settings.jobs)
    space = search_space(kind, fixed, limits)
    default = default_policy(kind, space, evaluator)
    if default is not None:
        space = space.around(default.settings)
    method = "grid" if space.size <= trials else settings.search
    propose: Propose
    if method == "grid":
        points = space.grid(int(min(trials, space.size)))
        count, batch, propose = len(points), BATCH, lambda tried, size: points[len(tried) :][:size]
    else:
        count, batch, propose = trials, ASKED, lambda tried, size: _ask_optuna(space, seed, tried, size)
    job = {"search": method, "trials": trials, "seed": seed}
    name = job_name(describe_job(kind, train, fixed, job)) if settings.storage else ""
    interrupted = False
    with open_study(settings.storage, name) as study:
        try:
            _replay_points(study, evaluator, space, count, batch, propose, progress or no_progress)
        except KeyboardInterrupt:
            interrupted = True
        tried = study.get_trials(deepcopy=False)
    ranking = sorted((trial for trial in tried if trial.value is not None), key=lambda trial: trial.values[0])
    if interrupted and not ranking:
        raise KeyboardInterrupt
    best, runner_up = _two_best([trial.params for trial in ranking or tried], bool(ranking), space, evaluator)
    refused = [] if interrupted else [trial.params for trial in tried if trial.value is None]
    return SearchResult(
        best=best,
        runner_up=runner_up,
        default=default,
        fixed=fixed,
        search=method,
        trials=len(tried),
        refused=len(refused),
        truncated=sum(isinstance(policy, Policy) for policy in evaluator.build(refused)),
        interrupted=interrupted,
        smaller=sum(SMALLER in trial.user_attrs for trial in tried),
    )


def best_policy(kind: type[Policy], train: PricedTrace, settings: SearchSettings = DEFAULT_SEARCH) -> Policy:
    """Search to the end, as comparisons do, and return the best policy; Ctrl-C raises KeyboardInterrupt."""
    return finished_search(kind, train, settings).best


def finished_search(kind: type[Policy], train: PricedTrace, settings: SearchSettings = DEFAULT_SEARCH) -> SearchResult:
    """Search to the end: Ctrl-C raises KeyboardInterrupt."""
    search_result = find_best(kind, train, settings)
    if search_result.interrupted:
        raise KeyboardInterrupt
    return search_result


def _replay_points(
    study: Study,
    evaluator: Evaluator,
    space: Space,
    count: int,
    batch_size: int,
    propose: Propose,
    progress: Counter,
) -> None:
    """Replay points on every sequence, in batches, until the study has so many.

    propose : the next points, by the trials before their batch and the batch's size. A batch that was cut short is
        proposed again from the same trials, so that a search that resumes tries what it would have tried
    """
    from optuna.trial import TrialState, create_trial

    distributions = {axis.name: _distribution(axis) for axis in space.axes}
    while len(tried := study.get_trials(deepcopy=False)) < count:
        start = len(tried) // batch_size * batch_size
        points = propose(tried[:start], min(batch_size, count - start))[len(tried) - start :]
        for point, seconds, smaller in _recorded_trees(evaluator, space, points):
            served = math.isfinite(seconds)
            outcome = TrialState.COMPLETE if served else TrialState.PRUNED  # which is worse than all others
            trial = create_trial(
                state=outcome,
                value=seconds if served else None,
                params=dict(point),
                distributions=distributions,
                user_attrs={SMALLER: True} if smaller else {},
            )
            study.add_trial(trial)
        progress(len(tried) + len(points), count)


def _recorded_trees(
    evaluator: Evaluator, space: Space, points: Sequence[Settings]
) -> list[tuple[Settings, float, bool]]:
    """Replay points; those that ask for more than the recorded trees hold, with the largest smaller trees that they do.

    A tree's size alone does not say whether a recording holds it: where all drafted nodes are verified it asks for
    unlikely ones, which a larger draft of as many verified nodes leaves out. Returns each point, its seconds and
    whether its trees were made smaller; points that no smaller trees serve are unchanged and take for ever.
    """
    times = evaluator.total_seconds(points)[1].tolist()
    series = [
        [] if math.isfinite(time_s) else smaller_trees(evaluator.kind, space, point)
        for point, time_s in zip(points, times, strict=True)
    ]
    smaller_times = iter(evaluator.total_seconds([smaller for each in series for smaller in each])[1].tolist())
    replayed = []
    for point, time_s, each in zip(points, times, series, strict=True):
        served = [(smaller, own_s, True) for smaller in each if math.isfinite(own_s := next(smaller_times))]
        replayed.append(served[0] if served else (point, time_s, False))
    return replayed


def _ask_optuna(space: Space, seed: int, tried: Sequence[FrozenTrial], size: int) -> list[Settings]:
    """Return the next points: first the defaults, then what the tree-structured Parzen estimator proposes."""
    import optuna

    study = optuna.create_study(sampler=tpe_sampler(seed, len(tried), constant_liar=True))
    study.add_trials(tried)
    distributions = {axis.name: _distribution(axis) for axis in space.axes}
    points = [] if tried else [space.default]
    return points + [study.ask(distributions).params for _ in range(size - len(points))]


def tpe_sampler(seed: int, done: int, *, constant_liar: bool = False) -> TPESampler:
    """Return Optuna's sampler, seeded by the number of trials done, so that a resumed search asks for the same.

    constant_liar : whether points that are asked for together are kept apart
    """
    import optuna

    with warnings.catch_warnings():  # some options are marked experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=int(np.random.SeedSequence((seed, done)).generate_state(1)[0]),
            multivariate=True,  # settings belong together, such as a threshold and its scale
            constant_liar=constant_liar,
        )


def _distribution(axis: Axis) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.values is None:
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    if isinstance(axis.values, range):
        return IntDistribution(axis.values[0], axis.values[-1], log=axis.log)
    return CategoricalDistribution(tuple(axis.values))


def _two_best(
    points: Sequence[Settings], served: bool, space: Space, evaluator: Evaluator
) -> tuple[Policy, Policy | None]:
    """Return the best policy, and the next best that differs from it clearly; raise InputError if all are refused.

    points : from the best, if any is served; else all
    """
    best, *others = points
    policy = evaluator.build_or_raise(best)
    if not served:
        raise InputError(
            f"policy {evaluator.kind.name}: all {len(points)} points ask for more than the recorded trees hold "
            f"in over {100 * MAX_TRUNCATED_SHARE:.0f} % of the rounds; record more with `realrun record --tree-nodes`"
        )
    runner_up = next((point for point in others if space.apart(best, point)), None)
    return policy, None if runner_up is None else evaluator.build_or_raise(runner_up)


def fixed_settings(kind: type[Policy], given: Settings, limits: Limits) -> Settings:
    """Settings that are not searched: those fixed by the caller, and bounds of the draft without a search range.

    Chains draft at most as long as recorded; trees keep their default bounds where the record holds them. Raises
    InputError for an unknown or illegal setting.
    """
    fixed = dict(given)
    tuned = {field.name for field in tuned_fields(kind)}
    for name, most in bounded(kind, limits).items():
        if name not in tuned and (issubclass(kind, ChainPolicy) or getattr(kind, name) > most):
            fixed.setdefault(name, most)
    policy = build_policy(kind, fixed)
    return {key: getattr(policy, key) for key in fixed}  # parsed


def default_policy(kind: type[Policy], space: Space, evaluator: Evaluator) -> Policy | None:
    """Build the policy with its default or learned settings, whole numbers within the space; None if refused."""
    whole = {axis.name: axis.default for axis in space.axes if isinstance(axis.values, range)}
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    policy = evaluator.build([{name: value for name, value in whole.items() if value != defaults[name]}])[0]
    return None if isinstance(policy, InputError) else policy


def best_fixed_k(train: PricedTrace, search_result: SearchResult, settings: SearchSettings) -> Policy | None:
    """Find the fastest fixed draft length, of any drafter, on the sequences of a search; None if all are refused."""
    depth = train.trace.depth
    lengths = range(1, int(search_result.fixed.get("max_draft_tokens", depth)) + 1)
    kind: type[Policy] = FixedK
    points: list[Settings] = [{"k": k} for k in lengths]
    if isinstance(train.trace, JoinedTrace):
        drafters = range(1, len(train.trace.parts) + 1)
        kind, points = OneDrafter, [{"drafter": n, "k1": k, "k2": k, "k3": k} for n in drafters for k in lengths]
    tried = evaluate_many(kind, points, train, seed=settings.seed, jobs=settings.jobs)
    return tried.policies[int(np.argmin(tried.seconds))]
