"""Tune a policy on part of a trace, report on the rest; and cross-validate that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specsim.cost.files import CostLike
from specsim.io.progress import Counter
from specsim.learn.held_out import (
    BEST_FIXED_K,
    DEFAULT,
    RUNNER_UP,
    TUNED,
    CrossValidation,
    Fold,
    HeldOutReplays,
    TuneResult,
    replay_with_oracle,
)
from specsim.learn.predict import priced
from specsim.learn.search import SearchResult, best_fixed_k, find_best
from specsim.learn.settings import DEFAULT_SEARCH, Search, SearchSettings
from specsim.policy.base import Policy
from specsim.policy.registry import PolicyName, find_policy
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import TraceLike
from specsim.trace.split import fold_sequences, split_sequences


def tune(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyName,
    *,
    search: Search = "optuna",
    trials: int = 100,
    tuning_share: float = 0.5,
    seed: int = 0,
    jobs: int | None = None,
    storage: Path | None = None,
    progress: Counter | None = None,
    **fixed: Any,
) -> TuneResult:
    """Tune a policy's settings on a part of the trace and report on the held-out part.

    Parameters
    ----------
    trace, cost
        As in `predict`.
    policy : str, Path or class
        A name that `policies` lists, FILE.py, FILE.py:NAME, or a class.
    search : {"optuna", "grid"}
        Optuna's tree-structured Parzen estimator, or an even grid. A space of at most `trials` points is enumerated.
    trials : int
        Configurations to try.
    tuning_share : float
        Share of the sequences to tune on, in (0, 1).
    seed : int
        Seed of all randomness.
    jobs : int, optional
        Threads (default: one per core). Does not change the result.
    storage : Path, optional
        File of Optuna's journal storage, from which the same call resumes after an interruption.
    progress : callable, optional
        Called with (done, total) now and then.
    **fixed
        Settings that are not searched.

    Returns
    -------
    TuneResult
        `best` (the policy), `train` and `holdout` (predictions on both parts), `references` (the runner-up, the
        default settings, the best fixed K) and `warnings`; `to_frame()` is a pandas table, `plot()` a matplotlib
        figure.

    Raises
    ------
    InputError
        As in `predict`, and if trace and costs can serve no configuration.

    References
    ----------
    Akiba et al. 2019, arXiv:1907.10902 (Optuna).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> best = specsim.tune(trace, specsim.ConstantCost(s_d=0.001, s_t=0.010), "fixed_k")
    >>> best.best.k > 1
    True
    """
    settings = SearchSettings(search, trials, seed, jobs, storage, fixed)
    return tune_with(priced(trace, cost), policy, settings, tuning_share=tuning_share, progress=progress)


def tune_with(
    whole: PricedTrace,
    policy: PolicyName,
    settings: SearchSettings,
    *,
    tuning_share: float = 0.5,
    progress: Counter | None = None,
) -> TuneResult:
    """`tune`, with a `SearchSettings` object."""
    tuning, rest = split_sequences(whole.trace, tuning_share=tuning_share, seed=settings.seed)
    return tune_on(find_policy(policy), whole.select(tuning), whole.select(rest), settings, progress=progress)


def tune_on(
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
    first point's reason.
    """
    search_result = find_best(kind, train, settings, progress=progress)
    held_out = HeldOutReplays(kind, settings.seed)
    held_out.add(holdout, _policies(train, search_result, settings) if compare else {TUNED: search_result.best})
    report = held_out.result(tuned=search_result.best)
    return TuneResult(
        best=search_result.best,
        train=summarise(*replay_with_oracle(train, search_result.best, kind, settings.seed)),
        tuned_on=train.trace.sequences,
        reported_on=holdout.trace.sequences,
        **{**report, "warnings": (*_unjudged(search_result), *report["warnings"])},
        **{name: getattr(search_result, name) for name in ("trials", "refused", "search", "interrupted")},
    )


def _policies(train: PricedTrace, search_result: SearchResult, settings: SearchSettings) -> dict[str, Policy]:
    """Return the tuned policy and its references, by name."""
    policies = {
        TUNED: search_result.best,
        RUNNER_UP: search_result.runner_up,
        DEFAULT: search_result.default,
        BEST_FIXED_K: best_fixed_k(train, search_result, settings),
    }
    return {name: policy for name, policy in policies.items() if policy is not None}


def _unjudged(search_result: SearchResult) -> tuple[str, ...]:
    """Warn that the recorded trees were too small for part of the search."""
    if not search_result.truncated:
        return ()
    return (
        f"{search_result.truncated} of {search_result.trials} settings could not be judged: they ask for more than the "
        "recorded trees hold; record larger ones with `realrun record --tree-nodes --tree-width`",
    )


def cross_validate(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyName,
    *,
    folds: int = 5,
    search: Search = "optuna",
    trials: int = 100,
    seed: int = 0,
    jobs: int | None = None,
    storage: Path | None = None,
    progress: Counter | None = None,
    **fixed: Any,
) -> CrossValidation:
    """Estimate what tuning this policy gains: every sequence is held out once.

    Parameters
    ----------
    folds : int
        Parts of the sequences; each is reported on with the settings tuned on the others.
    trace, cost, policy, search, trials, seed, jobs, storage, progress, **fixed
        As in `tune`.

    Returns
    -------
    CrossValidation
        `estimate` (the prediction over all sequences), `folds`, `references` and `warnings`; `to_frame()` is a pandas
        table, `plot()` a matplotlib figure.

    Raises
    ------
    InputError
        As in `tune`, and for fewer than 2 folds or more than there are sequences.

    References
    ----------
    Stone 1974, Cross-Validatory Choice and Assessment of Statistical Predictions.

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> folded = specsim.cross_validate(trace, specsim.ConstantCost(s_d=0.001, s_t=0.010), "fixed_k", folds=4)
    >>> len(folded.folds)
    4
    """
    settings = SearchSettings(search, trials, seed, jobs, storage, fixed)
    return cross_validate_with(priced(trace, cost), policy, settings, folds=folds, progress=progress)


def cross_validate_with(
    whole: PricedTrace,
    policy: PolicyName,
    settings: SearchSettings = DEFAULT_SEARCH,
    *,
    folds: int = 5,
    progress: Counter | None = None,
) -> CrossValidation:
    """`cross_validate`, with a `SearchSettings` object. Ctrl-C ends it with the folds done so far."""
    kind, seed = find_policy(policy), settings.seed
    done: list[Fold] = []
    held_out = HeldOutReplays(kind, seed)
    for number, part in enumerate(fold_sequences(whole.trace, folds, seed=seed)):
        train, holdout = whole.select(np.setdiff1d(np.arange(whole.trace.sequences), part)), whole.select(part)

        def report(trials_done: int, total: int, number: int = number) -> None:
            if progress:
                progress(number * total + trials_done, folds * total)

        try:
            search_result = find_best(kind, train, settings, progress=report)
        except KeyboardInterrupt:
            if not done:
                raise
            break
        replay = held_out.add(holdout, _policies(train, search_result, settings))
        train_speedup = train.replay(search_result.best, seed=seed).speedup
        done.append(Fold(search_result, train_speedup, replay.speedup, len(part)))
        if search_result.interrupted:
            break
    interrupted = len(done) < folds or done[-1].search_result.interrupted
    return CrossValidation(folds=done, interrupted=interrupted, **held_out.result())
