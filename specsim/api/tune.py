"""Tune a policy, cross-validate its tuning, rank all policies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specsim.api.predict import priced
from specsim.api.tuned import CrossValidated, Tuned
from specsim.cost.files import CostLike
from specsim.policy.registry import PolicyName, find_policies, find_policy
from specsim.progress import Counter
from specsim.ranking.leaderboard import Board, default_policies
from specsim.ranking.leaderboard import leaderboard as boards_of
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import TraceLike
from specsim.trace.split import split_sequences
from specsim.tuning.crossval import cross_validate as run_cross_validate
from specsim.tuning.search import TuneResult
from specsim.tuning.search import tune as run_tune
from specsim.tuning.settings import Search, SearchSettings


def tune(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyName,
    *,
    search: Search | None = None,
    trials: int = 100,
    tuning_share: float = 0.5,
    seed: int = 0,
    jobs: int | None = None,
    storage: Path | None = None,
    progress: Counter | None = None,
    **fixed: Any,
) -> Tuned:
    """Find a policy's best settings on one part of the trace, report them on the other.

    Parameters
    ----------
    trace, cost
        As in `predict`.
    policy : str, Path or class
        A name that `policies` lists, FILE.py, FILE.py:NAME, or a class.
    search : {"grid", "race", "optuna"}, optional
        How to search. Default: Optuna for up to 500 trials where it is installed, else a race.
    trials : int
        Configurations to try.
    tuning_share : float
        Share of the sequences to tune on, in (0, 1).
    seed : int
        Seed of all randomness.
    jobs : int, optional
        Threads, by default one per core; the answer does not depend on it.
    storage : Path, optional
        A journal file; the same call goes on from it after a kill.
    progress : callable, optional
        Called with (done, total) now and then.
    **fixed
        Settings that are not searched.

    Returns
    -------
    Tuned
        `best` (the policy), `train` and `holdout` (predictions on both parts), `references` (the runner-up, the
        default settings, the best fixed K) and `warnings`; `to_frame()` is a pandas table, `plot()` a matplotlib
        figure.

    Raises
    ------
    InputError
        As in `predict`, and where trace or costs can serve no configuration.

    References
    ----------
    Jamieson and Talwalkar 2016, arXiv:1502.07943 (race); Akiba et al. 2019, arXiv:1907.10902 (Optuna).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> best = specsim.tune(trace, specsim.ConstantCost(s_d=0.001, s_t=0.010), "fixed_k")
    >>> best.best.k > 1
    True
    """
    settings = SearchSettings(search, trials, seed, jobs, storage, fixed)
    found = tune_with(priced(trace, cost), policy, settings, tuning_share=tuning_share, progress=progress)
    return Tuned(**vars(found))


def tune_with(
    whole: PricedTrace,
    policy: PolicyName,
    settings: SearchSettings,
    *,
    tuning_share: float = 0.5,
    progress: Counter | None = None,
) -> TuneResult:
    """`tune`, with how to search as one object."""
    tuning, rest = split_sequences(whole.trace, tuning_share=tuning_share, seed=settings.seed)
    return run_tune(find_policy(policy), whole.select(tuning), whole.select(rest), settings, progress=progress)


def cross_validate(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyName,
    *,
    folds: int = 5,
    search: Search | None = None,
    trials: int = 100,
    seed: int = 0,
    jobs: int | None = None,
    storage: Path | None = None,
    progress: Counter | None = None,
    **fixed: Any,
) -> CrossValidated:
    """Estimate what tuning this policy gains, every sequence reported on once and never tuned on.

    Parameters
    ----------
    folds : int
        Parts of the sequences; each is reported on with the settings tuned on the others.
    trace, cost, policy, search, trials, seed, jobs, storage, progress, **fixed
        As in `tune`; each fold has a journal of its own, STORAGE.1 and so on.

    Returns
    -------
    CrossValidated
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
    >>> found = specsim.cross_validate(trace, specsim.ConstantCost(s_d=0.001, s_t=0.010), "fixed_k", folds=4)
    >>> len(found.folds)
    4
    """
    settings = SearchSettings(search, trials, seed, jobs, storage, fixed)
    found = run_cross_validate(find_policy(policy), priced(trace, cost), settings, folds=folds, progress=progress)
    return CrossValidated(**vars(found))


def leaderboard(
    trace: TraceLike,
    cost: CostLike,
    *,
    policies: PolicyName | Iterable[PolicyName] = (),
    max_draft_tokens: int | None = None,
    trials: int = 100,
    tuning_share: float = 0.5,
    replays: int = 5,
    seed: int = 0,
    sensitivity: bool = False,
    jobs: int | None = None,
) -> Board:
    """Tune every policy on one part of the trace and rank them on the other.

    Parameters
    ----------
    trace, cost, trials, tuning_share, seed, jobs
        As in `tune`.
    policies : str, Path, class, or several, optional
        What to compare, each as in `tune`; default: all that are meant for such a trace.
    max_draft_tokens : int, optional
        Longest draft; default: as deep as recorded.
    replays : int
        Replays to average over where a policy draws.
    sensitivity : bool
        Vary each tuned setting over its range as well.

    Returns
    -------
    Board
        `rows`, best first, and `skipped`; `to_frame()` is a pandas table, `plot()` a matplotlib figure.

    Raises
    ------
    InputError
        As in `tune`, and where the trace serves none of the policies.

    References
    ----------
    Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 4.3 (intervals, paired over sequences).

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.generate(acceptance=0.8, sequences=20, output_tokens=60, depth=8)
    >>> board = specsim.leaderboard(trace, specsim.ConstantCost(0.001, 0.010), policies=["fixed_k", "adaedl"], trials=8)
    >>> board.to_frame()["speedup"].is_monotonic_decreasing
    True
    """
    whole = priced(trace, cost)
    (board,) = boards_of(
        {"trace": whole.trace},
        [whole.cost],
        kinds=list((find_policies(policies) or default_policies([whole.trace])).values()),
        max_drafts=() if max_draft_tokens is None else (max_draft_tokens,),
        trials=trials,
        tuning_share=tuning_share,
        replays=replays,
        seed=seed,
        sensitivity=sensitivity,
        jobs=jobs or -1,
    )
    return board
