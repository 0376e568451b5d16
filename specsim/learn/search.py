"""Search a policy's settings for the fewest seconds on a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress
from specsim.learn.evaluate import BATCH, MAX_TRUNCATED_SHARE, Evaluator, evaluate_many
from specsim.learn.journal import Journal, describe_job
from specsim.learn.optuna_search import search_optuna
from specsim.learn.race import race
from specsim.learn.search_state import SearchState
from specsim.learn.settings import DEFAULT_SEARCH, Search, SearchSettings
from specsim.learn.space import Limits, Settings, Space, bounded, recorded_limits, search_space, tuned_fields
from specsim.policy.base import Policy, build_policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace

OPTUNA_TRIALS = 500


@dataclass(frozen=True)
class SearchResult:
    """Best settings of a search.

    runner_up : the next best policy that differs clearly from the best; None if there is none
    trials, refused : points tried, and those of them that trace or costs cannot serve
    truncated : refused points that the recorded trees are too small for, whose speedup is unknown
    work : positions replayed, as a share of all points on all sequences
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
    work: float
    interrupted: bool
    truncated: int = 0


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
    method = settings.search or default_search(trials)
    if space.size <= trials:
        method = "grid"
    job = {"search": method, "trials": trials, "seed": seed}
    journal = Journal(settings.storage, describe_job(kind, train, fixed, job) if settings.storage else {})
    state = SearchState(evaluator, journal, progress or no_progress)
    interrupted = False
    try:
        _run(method, state, space, trials, seed)
    except KeyboardInterrupt:
        if not state.ranking:
            raise
        interrupted = True
    finally:
        journal.close()
    best, runner_up = _two_best(state, space)
    refused = [] if interrupted else state.refused_points()
    return SearchResult(
        best=best,
        runner_up=runner_up,
        default=default,
        fixed=fixed,
        search=method,
        trials=len(state.points),
        refused=len(refused),
        truncated=sum(isinstance(policy, Policy) for policy in evaluator.build(refused)),
        work=state.replayed_rows / (len(state.points) * state.rows),
        interrupted=interrupted,
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


def _run(method: Search, state: SearchState, space: Space, trials: int, seed: int) -> None:
    if method == "optuna":
        search_optuna(state, space, trials, seed)
    elif method == "race":
        race(state, space.sobol(trials, seed), seed)
    else:
        points = space.grid(int(min(trials, space.size)))
        state.replay_in_full(len(points), BATCH, lambda done, size: points[done : done + size])


def _two_best(state: SearchState, space: Space) -> tuple[Policy, Policy | None]:
    """Return the best policy, and the next best that differs from it clearly; raise InputError if all are refused."""
    evaluator = state.evaluator
    if not state.ranking:
        evaluator.build_or_raise(state.points[0])
        raise InputError(
            f"policy {evaluator.kind.name}: all {len(state.points)} points ask for more than the recorded trees hold "
            f"in over {100 * MAX_TRUNCATED_SHARE:.0f} % of the rounds; record more with `realrun record --tree-nodes`"
        )
    best, *others = [state.points[i] for i in state.ranking]
    runner_up = next((point for point in others if space.apart(best, point)), None)
    return evaluator.build_or_raise(best), None if runner_up is None else evaluator.build_or_raise(runner_up)


def default_search(trials: int) -> Search:
    """Choose Optuna up to OPTUNA_TRIALS, where it is installed; else a race.

    Optuna makes more of the same number of trials, because it replays each in full. With the work of 100 of those, a
    race tries 1000, finds at least as much on a trace of some dozens of sequences, and does not slow down with their
    number as Optuna's model does.
    """
    return "optuna" if trials <= OPTUNA_TRIALS and find_spec("optuna") else "race"


def fixed_settings(kind: type[Policy], given: Mapping[str, Any], limits: Limits) -> Settings:
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
