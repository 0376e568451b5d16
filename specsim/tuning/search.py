"""Tuning: search on one part of a trace, report on the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.errors import InputError
from specsim.policy.base import Policy, build_policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.progress import Counter, no_progress
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.speedup.intervals import Comparison
from specsim.speedup.prediction import Prediction, oracle_name, oracle_seconds, oracle_width, summarise
from specsim.speedup.simultaneous import simultaneous
from specsim.trace.joined import JoinedTrace
from specsim.tuning.evaluate import MAX_TRUNCATED_SHARE, Evaluator, evaluate_many, truncated_reason
from specsim.tuning.grid import grid_search
from specsim.tuning.journal import Journal, describe_job
from specsim.tuning.optuna_search import search_optuna
from specsim.tuning.race import race
from specsim.tuning.settings import DEFAULT_SEARCH, Search, SearchSettings
from specsim.tuning.space import Limits, Settings, Space, bounded, recorded_limits, search_space, tuned_fields
from specsim.tuning.trials import SearchContext, SearchState

if TYPE_CHECKING:
    import pandas as pd

OPTUNA_TRIALS = 500
RUNNER_UP, DEFAULT, BEST_FIXED_K = "runner_up", "default", "best_fixed_k"
CALLED = {RUNNER_UP: "the runner-up", DEFAULT: "the default settings", BEST_FIXED_K: "the best fixed K"}


@dataclass(frozen=True)
class SearchResult:
    """What a search ended with.

    runner_up : the best that differs from the best clearly; None if there is none
    trials, refused : points tried, and those of them that trace or costs cannot serve
    truncated : refused points that the recorded trees are too small for, whose speedup is unknown
    work : positions replayed, as a share of all points on all sequences
    interrupted : the search was stopped; these are the best so far
    """

    best: Policy
    runner_up: Policy | None
    search: str
    trials: int
    refused: int
    work: float
    interrupted: bool
    truncated: int = 0


@dataclass(frozen=True)
class Reference:
    """A policy to compare the tuned one with, on the sequences that did not tune.

    comparison : speedup of the tuned one less this one's
    """

    prediction: Prediction
    comparison: Comparison

    def as_dict(self) -> dict[str, Any]:
        return {**self.prediction.as_dict(), "comparison": self.comparison.as_dict()}


def frame_of(tuned: Mapping[str, Prediction], references: Mapping[str, Reference]) -> pd.DataFrame:
    """A table of what was tuned and what stands beside it, a row each, named in its index."""
    import pandas as pd  # slow to import, and a search does not need it

    rows = {**tuned, **{CALLED[name].removeprefix("the "): one.prediction for name, one in references.items()}}
    table = pd.concat([one.to_frame() for one in rows.values()], ignore_index=True).set_axis(list(rows))
    gains = [one.comparison.difference for one in references.values()]
    for column, key in (("tuned_gains", "estimate"), ("tuned_gains_low", "low"), ("tuned_gains_high", "high")):
        table[column] = [*[float("nan")] * len(tuned), *(getattr(gain, key) for gain in gains)]
    return table


@dataclass(frozen=True, repr=False)
class TuneResult:
    """The best settings found, with their prediction on both parts.

    tuned_on, reported_on : sequences of the two parts
    references : the runner-up of the search, the policy's defaults and the best fixed K, each
        chosen on the tuning part and compared on the other; without those that do not apply
    warnings : differences that are not significant on these data, a sentence each
    """

    best: Policy
    train: Prediction
    holdout: Prediction
    trials: int
    tuned_on: int = 0
    reported_on: int = 0
    refused: int = 0
    search: str = "grid"
    work: float = 1.0
    interrupted: bool = False
    references: Mapping[str, Reference] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        tried = f"best of {self.trials} configurations ({self.search}), reported on sequences that did not tune:"
        return "\n".join([tried, repr(self.holdout), *(f"warning: {text}" for text in self.warnings)])

    def to_frame(self) -> pd.DataFrame:
        """A table of predictions on sequences that did not tune: the tuned policy, then those beside it.

        "tuned_gains" is the tuned policy's speedup less the row's, with the ends of its paired 95 % interval.
        """
        return frame_of({"tuned": self.holdout}, self.references)

    @property
    def runner_up(self) -> Policy | None:
        """The second best of the search that differs from the best clearly."""
        return self.references[RUNNER_UP].prediction.policy if RUNNER_UP in self.references else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.best.name,
            "best_params": self.best.settings,
            "train": self.train.as_dict(),
            "holdout": self.holdout.as_dict(),
            "trials": self.trials,
            "refused": self.refused,
            "search": self.search,
            "work": self.work,
            "interrupted": self.interrupted,
            "oracle_of": oracle_name([type(self.best), FixedK]),
            "references": {name: reference.as_dict() for name, reference in self.references.items()},
            "warnings": list(self.warnings),
        }


def tune(
    kind: type[Policy],
    train: PricedTrace,
    holdout: PricedTrace,
    settings: SearchSettings = DEFAULT_SEARCH,
    *,
    compare: bool = True,
    progress: Counter | None = None,
) -> TuneResult:
    """Find the settings with the largest predicted speedup on `train`, report on `holdout`.

    compare : replay the references as well. Raises InputError where no point can be served, with the
    first one's reason.
    """
    found = find_best(kind, train, settings, progress=progress)
    _, on_train = replayed(train, found.best, settings.seed, kind)
    result, on_holdout = replayed(holdout, found.best, settings.seed, kind)
    references: dict[str, Reference] = {}
    if compare:
        others: dict[str, tuple[Replay, Prediction]] = {}
        for name, policy in reference_policies(kind, train, settings, found).items():
            other, prediction = replayed(holdout, policy, settings.seed, kind)
            if truncated_reason(holdout.trace, prediction.truncated_share) is None:
                others[name] = other, prediction
        references = compared(result, others)
    return TuneResult(
        best=found.best,
        train=on_train,
        holdout=on_holdout,
        tuned_on=train.trace.sequences,
        reported_on=holdout.trace.sequences,
        references=references,
        warnings=(*unjudged(found), *warnings_of(references, found.best, holdout.trace.sequences)),
        **{name: getattr(found, name) for name in ("trials", "refused", "search", "work", "interrupted")},
    )


def find_best(
    kind: type[Policy],
    train: PricedTrace,
    settings: SearchSettings = DEFAULT_SEARCH,
    *,
    progress: Counter | None = None,
) -> SearchResult:
    """Search the policy's space for the fewest seconds on this trace.

    Ctrl-C ends the search with the best so far, if there is any. Points that trace or costs
    cannot serve are passed over; if that is all of them, the first one's InputError is raised.
    """
    trace, trials, seed = train.trace, settings.trials, settings.seed
    limits = recorded_limits(train)
    fixed = fixed_settings(kind, {**kind.unsearched(trace), **settings.fixed}, limits)
    evaluator = Evaluator(kind, train, fixed=fixed, seed=seed, jobs=settings.jobs)
    space = search_space(kind, fixed, limits)
    start = default_policy(kind, space, evaluator)
    if start is not None:
        space = space.around(start.settings)
    how = settings.search or default_search(trials)
    if space.size <= trials:
        how = "grid"
    job = {"search": how, "trials": trials, "seed": seed}
    journal = Journal(settings.storage, describe_job(kind, train, fixed, job) if settings.storage else {})
    done = SearchState()
    task = SearchContext(evaluator, journal, done, progress or no_progress)
    interrupted = False
    try:
        _run(how, task, space, trials, seed)
    except KeyboardInterrupt:
        if not done.ranking:
            raise
        interrupted = True
    finally:
        journal.close()
    return _conclude(evaluator, space, done, how, interrupted)


def best_policy(kind: type[Policy], train: PricedTrace, settings: SearchSettings = DEFAULT_SEARCH) -> Policy:
    """The best policy of a search that went to its end, as comparisons take it: Ctrl-C ends them too."""
    return finished_search(kind, train, settings).best


def finished_search(kind: type[Policy], train: PricedTrace, settings: SearchSettings = DEFAULT_SEARCH) -> SearchResult:
    """Search to the end: Ctrl-C raises KeyboardInterrupt."""
    found = find_best(kind, train, settings)
    if found.interrupted:
        raise KeyboardInterrupt
    return found


def _run(how: Search, task: SearchContext, space: Space, trials: int, seed: int) -> None:
    if how == "optuna":
        search_optuna(task, space, trials, seed)
    elif how == "race":
        race(task, space.sobol(trials, seed), seed)
    else:
        grid_search(task, space.grid(int(min(trials, space.size))))


def _conclude(evaluator: Evaluator, space: Space, done: SearchState, how: Search, interrupted: bool) -> SearchResult:
    def built(point: Settings) -> Policy:
        policy = evaluator.build([point])[0]
        if isinstance(policy, InputError):
            raise policy
        return policy

    if not done.ranking:
        built(done.points[0])  # raises its reason, if it has one
        raise InputError(
            f"policy {evaluator.kind.name}: all {len(done.points)} points ask for more than the recorded trees hold in "
            f"over {100 * MAX_TRUNCATED_SHARE:.0f} % of the rounds; record more with `realrun record --tree-nodes`"
        )
    left_out = [point for i, point in enumerate(done.points) if i not in set(done.ranking) and not interrupted]
    best, *others = [done.points[i] for i in done.ranking]
    runner_up = next((point for point in others if space.apart(best, point)), None)
    return SearchResult(
        best=built(best),
        runner_up=None if runner_up is None else built(runner_up),
        search=how,
        trials=len(done.points),
        refused=len(left_out),
        truncated=sum(isinstance(policy, Policy) for policy in evaluator.build(left_out)),
        work=done.replayed_rows / (len(done.points) * len(evaluator.trace.token)),
        interrupted=interrupted,
    )


def default_search(trials: int) -> Search:
    """Optuna up to OPTUNA_TRIALS, where it is installed; else a race.

    Of as many trials Optuna makes more, as each is replayed in full. For the work of 100 of
    them a race takes 1000, finds at least as much on a trace of some dozens of sequences, and
    does not slow down with their number as Optuna's model does.
    """
    return "optuna" if trials <= OPTUNA_TRIALS and find_spec("optuna") else "race"


def fixed_settings(kind: type[Policy], given: Mapping[str, Any], limits: Limits) -> Settings:
    """What is not searched: settings fixed by the caller, and bounds of the draft without a search range.

    Those are at what is recorded: of chains the longest draft in any case, of trees where their default exceeds it.
    Raises InputError for an unknown or illegal setting.
    """
    fixed = dict(given)
    tuned = {field.name for field in tuned_fields(kind)}
    for name, most in bounded(kind, limits).items():
        if name not in tuned and (issubclass(kind, ChainPolicy) or getattr(kind, name) > most):
            fixed.setdefault(name, most)
    policy = build_policy(kind, fixed)
    return {key: getattr(policy, key) for key in fixed}  # parsed


def default_policy(kind: type[Policy], space: Space, evaluator: Evaluator) -> Policy | None:
    """The policy with what it has by default or learns, whole numbers within the space; None if refused."""
    whole = {axis.name: axis.default for axis in space.axes if isinstance(axis.values, range)}
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    policy = evaluator.build([{name: value for name, value in whole.items() if value != defaults[name]}])[0]
    return None if isinstance(policy, InputError) else policy


def reference_policies(
    kind: type[Policy], train: PricedTrace, settings: SearchSettings, found: SearchResult
) -> dict[str, Policy]:
    """What the tuned policy must beat: runner-up, defaults, and the fixed K, of any drafter, best on `train`."""
    depth, seed, jobs = train.trace.depth, settings.seed, settings.jobs
    policies: dict[str, Policy | None] = {RUNNER_UP: found.runner_up}
    limits = recorded_limits(train)
    fixed = fixed_settings(kind, {**kind.unsearched(train.trace), **settings.fixed}, limits)
    evaluator = Evaluator(kind, train, fixed=fixed, seed=seed, jobs=jobs)
    policies[DEFAULT] = default_policy(kind, search_space(kind, fixed, limits), evaluator)
    lengths = range(1, int(fixed.get("max_draft_tokens", depth)) + 1)
    kind, points = FixedK, [{"k": k} for k in lengths]
    if isinstance(train.trace, JoinedTrace):
        numbers = range(1, len(train.trace.parts) + 1)
        kind, points = OneDrafter, [{"drafter": n, "k1": k, "k2": k, "k3": k} for n in numbers for k in lengths]
    tried = evaluate_many(kind, points, train, seed=seed, jobs=jobs)
    policies[BEST_FIXED_K] = tried.policies[int(np.argmin(tried.seconds))]
    return {name: policy for name, policy in policies.items() if policy is not None}


def replayed(priced: PricedTrace, policy: Policy, seed: int, kind: type[Policy]) -> tuple[Replay, Prediction]:
    """One replay under the policy's own cost of a round, and its summary; the oracle of this kind and of chains."""
    result = priced.replay(policy, seed=seed)
    oracle_s = oracle_seconds(priced, [kind, FixedK], width=oracle_width(policy), seed=seed)
    return result, summarise(result, oracle_s)


def compared(tuned: Replay, others: Mapping[str, tuple[Replay, Prediction]]) -> dict[str, Reference]:
    """The tuned policy against each of the others, on the same sequences, with intervals that hold all at once."""
    seconds = [tuned.speculative_s, *(replay.speculative_s for replay, _ in others.values())]
    found = simultaneous(tuned.autoregressive_s, seconds)
    return {
        name: Reference(prediction, found.difference(0, at))
        for at, (name, (_, prediction)) in enumerate(others.items(), start=1)
    }


def unjudged(found: SearchResult) -> tuple[str, ...]:
    """A sentence where the recorded trees were too small for part of the search."""
    if not found.truncated:
        return ()
    return (
        f"{found.truncated} of {found.trials} settings could not be judged: they ask for more than the recorded trees "
        "hold; record larger ones with `realrun record --tree-nodes --tree-width`",
    )


def warnings_of(references: Mapping[str, Reference], tuned: Policy | None, sequences: int) -> tuple[str, ...]:
    """A sentence for each reference, but the tuned policy itself, that the data do not show to be slower."""
    found = []
    for name, reference in references.items():
        comparison = reference.comparison
        if reference.prediction.policy == tuned:
            continue
        if not comparison.significant:
            found.append(
                f"not significant on {sequences} sequences: the tuned policy's speedup differs from that of "
                f"{CALLED[name]} by {comparison.difference}"
            )
        elif comparison.difference.high < 0:
            found.append(
                f"the tuned policy is slower than {CALLED[name]}, {reference.prediction.policy}: "
                f"speedup differs by {comparison.difference}"
            )
    return tuple(found)
