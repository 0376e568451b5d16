"""Tune a policy on part of a trace, report on the rest; and cross-validate that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.cost.files import CostLike
from specsim.io.arrays import Floats
from specsim.io.progress import Counter
from specsim.learn.evaluate import truncated_reason
from specsim.learn.predict import priced
from specsim.learn.search import SearchResult, best_fixed_k, find_best
from specsim.learn.settings import DEFAULT_SEARCH, Search, SearchSettings
from specsim.learn.space import tuned_fields
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import PolicyName, find_policy
from specsim.replaying.intervals import Comparison, simultaneous
from specsim.replaying.prediction import Prediction, oracle_name, oracle_seconds, oracle_width, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.result import Result
from specsim.trace.files import TraceLike
from specsim.trace.split import fold_sequences, split_sequences
from specsim.trace.trace import Trace
from specsim.trace.tree_record import MAX_NODES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


RUNNER_UP, DEFAULT, BEST_FIXED_K = "runner_up", "default", "best_fixed_k"
CALLED = {RUNNER_UP: "the runner-up", DEFAULT: "the default settings", BEST_FIXED_K: "the best fixed K"}
TUNED = "tuned"


@dataclass(frozen=True)
class Reference:
    """A policy to compare the tuned policy with, on held-out sequences.

    comparison : speedup of the tuned policy less this policy's
    """

    prediction: Prediction
    comparison: Comparison

    def as_dict(self) -> dict[str, Any]:
        return {**self.prediction.as_dict(), "comparison": self.comparison.as_dict()}


@dataclass(frozen=True, repr=False, kw_only=True)
class HeldOutResult(Result):
    """A tuned policy on held-out sequences, beside its references.

    holdout : prediction of the tuned policy
    references : the runner-up of the search, the policy's defaults and the best fixed K, each chosen on the tuning
        sequences; without those that do not apply
    warnings : differences that are not significant on these data, a sentence each
    interrupted : the search was stopped; these are the best settings so far
    """

    holdout: Prediction
    references: Mapping[str, Reference] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def headline(self) -> str:
        """Say what was tried."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join([self.headline, repr(self.holdout), *(f"warning: {text}" for text in self.warnings)])

    @property
    def predictions(self) -> dict[str, Prediction]:
        """Predictions on held-out sequences by name, the tuned policy's first."""
        others = {CALLED[name].removeprefix("the "): other.prediction for name, other in self.references.items()}
        return {TUNED: self.holdout, **others}

    def to_frame(self) -> pd.DataFrame:
        """Tabulate the predictions on held-out sequences, a row each: the tuned policy, then its references.

        "tuned_gains" is the tuned policy's speedup less the row's, with the ends of its paired 95 % interval.
        """
        import pandas as pd  # slow to import, and a search does not need it

        table = pd.concat([row.to_frame() for row in self.predictions.values()], ignore_index=True)
        table = table.set_axis(list(self.predictions))
        gains = [reference.comparison.difference for reference in self.references.values()]
        for column, key in (("tuned_gains", "estimate"), ("tuned_gains_low", "low"), ("tuned_gains_high", "high")):
            table[column] = [float("nan"), *(getattr(gain, key) for gain in gains)]
        return table

    def plot(self) -> Figure:
        """Plot the held-out speedup of the tuned policy with its 95 % interval, above its references.

        Returns
        -------
        matplotlib.figure.Figure

        Examples
        --------
        >>> import specsim
        >>> trace, cost = specsim.read_trace("example:lab-eagle"), specsim.read_cost("example:lab-deep-eagle")
        >>> figure = specsim.tune(trace, cost, "fixed_k").plot()
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['tuned', 'runner-up', 'default settings', 'best fixed K']
        """
        from specsim.report.figures import estimates_figure  # matplotlib is slow to import

        speedups = [prediction.speedup.as_dict() for prediction in self.predictions.values()]
        return estimates_figure(list(self.predictions), speedups, "held-out speedup, with 95 % intervals")


@dataclass(frozen=True, repr=False, kw_only=True)
class TuneResult(HeldOutResult):
    """The best settings of a search, with their prediction on both parts.

    tuned_on, reported_on : sequences of the two parts
    trials, refused, search : as of `SearchResult`
    """

    best: Policy
    train: Prediction
    trials: int
    refused: int
    search: str
    tuned_on: int
    reported_on: int

    @property
    def headline(self) -> str:
        return f"best of {self.trials} configurations ({self.search}), reported on held-out sequences:"

    @property
    def runner_up(self) -> Policy | None:
        """The second best settings of the search that differ clearly from the best."""
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
            "interrupted": self.interrupted,
            "oracle_of": oracle_name([type(self.best), FixedK]),
            "references": {name: reference.as_dict() for name, reference in self.references.items()},
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Fold:
    """A part of the sequences, held out while its policy was tuned on the others."""

    search_result: SearchResult
    train_speedup: float
    holdout_speedup: float
    sequences: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "best_params": self.search_result.best.settings,
            "train_speedup": self.train_speedup,
            "holdout_speedup": self.holdout_speedup,
            "sequences": self.sequences,
            "trials": self.search_result.trials,
        }


@dataclass(frozen=True, repr=False, kw_only=True)
class CrossValidation(HeldOutResult):
    """Estimate the gain of tuning this kind of policy on these data, with every sequence held out once.

    Predictions cover all folds, each replayed with its own settings; the policies they name are the first fold's. After
    an interruption only the folds listed are part of them.
    """

    folds: list[Fold]

    @property
    def estimate(self) -> Prediction:
        """Prediction over all folds."""
        return self.holdout

    @property
    def headline(self) -> str:
        return f"cross-validated in {len(self.folds)} folds, the settings of the first:"

    def as_dict(self) -> dict[str, Any]:
        return {
            "estimate": self.estimate.as_dict(),
            "folds": [fold.as_dict() for fold in self.folds],
            "references": {name: reference.as_dict() for name, reference in self.references.items()},
            "warnings": list(self.warnings),
            "interrupted": self.interrupted,
        }


class HeldOutReplays:
    """Replays of a tuned policy and its references on the held-out sequences of all splits."""

    def __init__(self, kind: type[Policy], seed: int) -> None:
        self.kind, self.seed = kind, seed
        self._replays: dict[str, list[tuple[Replay, Floats]]] = {}  # with the oracle's seconds per sequence [S]

    def add(self, holdout: PricedTrace, policies: Mapping[str, Policy]) -> Replay:
        """Replay the policies of a split, by name, the tuned policy first; return its replay.

        References that ask for more than the recorded trees hold are left out.
        """
        for name, policy in policies.items():
            replay, oracle_s = replay_with_oracle(holdout, policy, self.kind, self.seed)
            truncated = 0.0 if replay.truncated is None else float(replay.truncated.sum() / replay.num_rounds.sum())
            if name == TUNED or truncated_reason(holdout.trace, truncated) is None:
                self._replays.setdefault(name, []).append((replay, oracle_s))
        return self._replays[TUNED][-1][0]

    def result(self, tuned: Policy | None = None) -> dict[str, Any]:
        """Predictions, references and warnings, as fields of `HeldOutResult`.

        tuned : the tuned policy, to compare with which a warning makes no sense; None where each split has its own
        """
        splits = len(self._replays[TUNED])
        whole = {name: _joined(parts) for name, parts in self._replays.items() if len(parts) == splits}
        predictions = {name: summarise(replay, oracle_s) for name, (replay, oracle_s) in whole.items()}
        if len(whole) == 1:
            return {"holdout": predictions[TUNED], "references": {}, "warnings": ()}
        replays = [replay for replay, _ in whole.values()]
        differences = simultaneous(replays[0].autoregressive_s, [replay.speculative_s for replay in replays])
        references = {
            name: Reference(predictions[name], differences.difference(0, at))
            for at, name in enumerate(whole)
            if name != TUNED
        }
        warnings = tuple(_insignificant(references, tuned, len(replays[0].num_rounds)))
        return {"holdout": predictions[TUNED], "references": references, "warnings": warnings}


def replay_with_oracle(priced: PricedTrace, policy: Policy, kind: type[Policy], seed: int) -> tuple[Replay, Floats]:
    """Replay a policy; also give the seconds per sequence [S] of the oracle of this kind and of chains."""
    replay = priced.replay(policy, seed=seed)  # first, because it says what trace or costs cannot serve
    return replay, oracle_seconds(priced, [kind, FixedK], width=oracle_width(policy))


def _joined(parts: Sequence[tuple[Replay, Floats]]) -> tuple[Replay, Floats]:
    """Replays of disjoint sequences, with the oracle's seconds, as a single replay under the first policy."""
    first = parts[0][0]
    columns: dict[str, Any] = {
        name: np.concatenate([replay.columns[name] for replay, _ in parts]) for name in first.columns
    }
    return dataclasses.replace(first, rounds=None, **columns), np.concatenate([oracle_s for _, oracle_s in parts])


def _insignificant(references: Mapping[str, Reference], tuned: Policy | None, sequences: int) -> list[str]:
    """Warn of each reference, but the tuned policy itself, that the data do not show to be slower."""
    warnings = []
    for name, reference in references.items():
        difference = reference.comparison.difference
        if reference.prediction.policy == tuned:
            continue
        if not reference.comparison.significant:
            warnings.append(
                f"not significant on {sequences} sequences: the tuned policy's speedup differs from that of "
                f"{CALLED[name]} by {difference}"
            )
        elif difference.high < 0:
            warnings.append(
                f"the tuned policy is slower than {CALLED[name]}, {reference.prediction.policy}: "
                f"speedup differs by {difference}"
            )
    return warnings


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
        **{**report, "warnings": (*_unjudged(search_result, train.trace), *report["warnings"])},
        **{name: getattr(search_result, name) for name in ("trials", "refused", "search", "interrupted")},
    )


def _policies(train: PricedTrace, search_result: SearchResult, settings: SearchSettings) -> dict[str, Policy]:
    policies = {
        TUNED: search_result.best,
        RUNNER_UP: search_result.runner_up,
        DEFAULT: search_result.default,
        BEST_FIXED_K: best_fixed_k(train, search_result, settings),
    }
    return {name: policy for name, policy in policies.items() if policy is not None}


def _unjudged(search_result: SearchResult, trace: Trace) -> tuple[str, ...]:
    """Warn that the recorded trees were too small for part of the search, and say which to record."""
    told = {
        "could not be judged": search_result.truncated,
        "were tried with smaller trees than proposed": search_result.smaller,
    }
    found = [f"{count} of {search_result.trials} settings {what}" for what, count in told.items() if count]
    if not found or trace.tree is None:
        return ()
    kind = type(search_result.best)
    ends = [field.metadata["tune"][1] for field in tuned_fields(kind) if field.metadata["bounds"] == "width"]
    width, nodes = max([trace.tree.width, *ends]), min(2 * trace.tree.nodes, MAX_NODES)
    return (
        f"{', '.join(found)}: they ask for more than the recorded trees hold, or the costs cover; record larger ones, "
        f"with `realrun record --tree-nodes {nodes} --tree-width {width}`",
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
