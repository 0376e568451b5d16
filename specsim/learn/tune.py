"""Tune a policy on part of a trace, report on the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from specsim.trace.split import split_sequences
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
class TuneResult(Result):
    """The best settings of a search, with predicted speedups on the tuning and the held-out sequences.

    best : the tuned policy
    train, holdout : its predictions on the sequences that it was tuned on, and on the held-out ones
    references : the runner-up of the search, the policy's defaults and the best fixed K, each chosen on the tuning
        sequences; without those that do not apply
    warnings : differences that are not significant on these data, a sentence each
    interrupted : the search was stopped; these are the best settings so far
    tuned_on, reported_on : sequences of the two parts
    trials, refused, search : as of `SearchResult`
    """

    best: Policy
    train: Prediction
    holdout: Prediction
    references: Mapping[str, Reference]
    warnings: tuple[str, ...]
    trials: int
    refused: int
    search: str
    interrupted: bool
    tuned_on: int
    reported_on: int

    def __repr__(self) -> str:
        headline = f"best of {self.trials} configurations ({self.search}), reported on held-out sequences:"
        return "\n".join([headline, repr(self.holdout), *(f"warning: {text}" for text in self.warnings)])

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


def _held_out(
    holdout: PricedTrace, policies: Mapping[str, Policy], kind: type[Policy], seed: int
) -> tuple[Prediction, dict[str, Reference], list[str]]:
    """Predict these policies, the tuned one first, on held-out sequences: its prediction, the others', and warnings.

    References that ask for more than the recorded trees hold are left out.
    """
    replays = {name: replay_with_oracle(holdout, policy, kind, seed) for name, policy in policies.items()}
    predictions = {
        name: summarise(*replayed)
        for name, replayed in replays.items()
        if name == TUNED or truncated_reason(holdout.trace, summarise(*replayed).truncated_share) is None
    }
    judged = [replays[name][0] for name in predictions]
    differences = simultaneous(judged[0].autoregressive_s, [replay.speculative_s for replay in judged])
    references = {
        name: Reference(prediction, differences.difference(0, at))
        for at, (name, prediction) in enumerate(predictions.items())
        if at
    }
    return predictions[TUNED], references, _insignificant(references, policies[TUNED], holdout.trace.sequences)


def replay_with_oracle(priced: PricedTrace, policy: Policy, kind: type[Policy], seed: int) -> tuple[Replay, Floats]:
    """Replay a policy; also give the seconds per sequence [S] of the oracle of this kind and of chains."""
    replay = priced.replay(policy, seed=seed)  # first, because it says what trace or costs cannot serve
    return replay, oracle_seconds(priced, [kind, FixedK], width=oracle_width(policy))


def _insignificant(references: Mapping[str, Reference], tuned: Policy, sequences: int) -> list[str]:
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
    tuning_share: float,
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
    progress: Counter | None = None,
) -> TuneResult:
    """Find the settings with the largest predicted speedup on `train`, report on `holdout`.

    Raises InputError where no point can be served, with the first point's reason.
    """
    search_result = find_best(kind, train, settings, progress=progress)
    prediction, references, insignificant = _held_out(
        holdout, _policies(train, search_result, settings), kind, settings.seed
    )
    return TuneResult(
        best=search_result.best,
        train=summarise(*replay_with_oracle(train, search_result.best, kind, settings.seed)),
        holdout=prediction,
        references=references,
        warnings=(*_unjudged(search_result, train.trace), *insignificant),
        tuned_on=train.trace.sequences,
        reported_on=holdout.trace.sequences,
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
