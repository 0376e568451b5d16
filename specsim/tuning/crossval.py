"""Cross-validation over sequences: tune inside each training part, report on what it left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.arrays import Floats, Ints
from specsim.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.progress import Counter
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.speedup.prediction import Prediction, oracle_seconds, summarise
from specsim.trace.split import groups
from specsim.trace.trace import Trace
from specsim.tuning.search import (
    Reference,
    SearchResult,
    compared,
    find_best,
    frame_of,
    reference_policies,
    warnings_of,
)
from specsim.tuning.settings import DEFAULT_SEARCH, SearchSettings

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Fold:
    """One part of the sequences, held out while its policy was tuned on the others."""

    found: SearchResult
    train_speedup: float
    holdout_speedup: float
    sequences: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "best_params": self.found.best.settings,
            "train_speedup": self.train_speedup,
            "holdout_speedup": self.holdout_speedup,
            "sequences": self.sequences,
            "trials": self.found.trials,
        }


@dataclass(frozen=True, repr=False)
class CrossValidation:
    """What tuning this kind of policy on these data gains, every sequence held out once.

    estimate : all folds together, each replayed with its own settings; its `policy` is the first fold's
    references : each fold's runner-up, defaults and best fixed K, all folds together
    interrupted : stopped early; only the folds listed are part of the estimate
    """

    folds: list[Fold]
    estimate: Prediction
    references: Mapping[str, Reference]
    warnings: tuple[str, ...]
    interrupted: bool

    def __repr__(self) -> str:
        tried = f"cross-validated in {len(self.folds)} folds, the settings of the first:"
        return "\n".join([tried, repr(self.estimate), *(f"warning: {text}" for text in self.warnings)])

    def to_frame(self) -> pd.DataFrame:
        """A table of predictions over all folds: the tuned policies', then those beside them; as of `TuneResult`."""
        return frame_of({"tuned": self.estimate}, self.references)

    def as_dict(self) -> dict[str, Any]:
        return {
            "estimate": self.estimate.as_dict(),
            "folds": [fold.as_dict() for fold in self.folds],
            "references": {name: reference.as_dict() for name, reference in self.references.items()},
            "warnings": list(self.warnings),
            "interrupted": self.interrupted,
        }


def fold_sequences(trace: Trace, folds: int, *, seed: int = 0) -> list[Ints]:
    """Disjoint sequence indices of each fold, all together all sequences; every domain evenly spread.

    Sequences of one source are in one fold. Raises InputError for fewer than 2 folds or more folds than there are
    sequences, or sources.
    """
    group = groups(trace)
    first = np.unique(group)
    if not 2 <= folds <= len(first):
        of = "" if len(first) == trace.sequences else f" from {len(first)} files"
        raise InputError(
            f"folds={folds} cannot divide {trace.sequences} sequences{of}; give a number from 2 to {len(first)}"
        )
    rng = np.random.default_rng(seed)
    dealt = np.concatenate(
        [rng.permutation(first[trace.domain[first] == domain]) for domain in np.unique(trace.domain)]
    )
    return [np.flatnonzero(np.isin(group, dealt[fold::folds])) for fold in range(folds)]


def cross_validate(
    kind: type[Policy],
    whole: PricedTrace,
    settings: SearchSettings = DEFAULT_SEARCH,
    *,
    folds: int = 5,
    progress: Counter | None = None,
) -> CrossValidation:
    """Tune on all folds but one, replay that one, for each in turn; one estimate over all sequences.

    The storage of the settings, if given, is a journal per fold: FILE.1, FILE.2 and so on. Ctrl-C ends it
    with the folds done so far.
    """
    sequences, seed, storage = whole.trace.sequences, settings.seed, settings.storage
    done: list[Fold] = []
    replays: dict[str, list[Replay]] = {}
    oracle_s: list[Floats] = []
    for number, part in enumerate(fold_sequences(whole.trace, folds, seed=seed)):
        train, holdout = whole.select(np.setdiff1d(np.arange(sequences), part)), whole.select(part)

        def report(trials_done: int, total: int, number: int = number) -> None:
            if progress:
                progress(number * total + trials_done, folds * total)

        journal = storage.with_name(f"{storage.name}.{number + 1}") if storage else None
        try:
            found = find_best(kind, train, dataclasses.replace(settings, storage=journal), progress=report)
        except KeyboardInterrupt:
            if not done:
                raise
            break
        policies = {"": found.best, **reference_policies(kind, train, settings, found)}
        for name, policy in policies.items():
            replays.setdefault(name, []).append(holdout.replay(policy, seed=seed))
        oracle_s.append(oracle_seconds(holdout, [kind, FixedK], seed=seed))
        train_speedup = train.replay(found.best, seed=seed).speedup
        done.append(Fold(found, train_speedup, replays[""][-1].speedup, len(part)))
        if found.interrupted:
            break
    tuned = together(replays.pop(""))
    oracle = np.concatenate(oracle_s)
    others = {}
    for name, ones in replays.items():
        if len(ones) == len(done):  # it applies in every fold
            other = together(ones)
            others[name] = other, summarise(other, oracle)
    references = compared(tuned, others)
    return CrossValidation(
        folds=done,
        estimate=summarise(tuned, oracle),
        references=references,
        warnings=warnings_of(references, None, len(tuned.num_rounds)),
        interrupted=len(done) < folds or done[-1].found.interrupted,
    )


def together(replays: list[Replay]) -> Replay:
    """Replays of disjoint sequences as one, under the first one's policy."""
    columns: dict[str, Any] = {
        name: np.concatenate([one.columns[name] for one in replays]) for name in replays[0].columns
    }
    return dataclasses.replace(replays[0], rounds=None, **columns)
