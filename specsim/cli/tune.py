"""`specsim tune`: search a policy's settings on a part of a trace, report on the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specsim.cli.command import Answer
from specsim.cli.console import print_notes, print_table, progress_bar
from specsim.cli.options import JOBS_HELP, CostSettings, PolicySettings, SplitSettings, TraceSettings
from specsim.io.errors import Interrupted
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.learn.tune import CrossValidation, Reference, TuneResult
    from specsim.policy.base import Policy
    from specsim.replaying.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class TuneOptions(SplitSettings, PolicySettings, TraceSettings):
    """Which policy is tuned, and how."""

    search: Literal["optuna", "grid"] = setting(
        "optuna", "Optuna's TPE, or an even grid. A space of at most --trials points is enumerated either way."
    )
    trials: int = setting(100, "Configurations to try.", low=1)
    folds: int | None = setting(
        None,
        "Cross-validate in N folds. Settings are tuned on all sequences; held-out figures come from the folds.",
        metavar="N",
        low=2,
    )
    storage: Path | None = setting(
        None,
        "File of Optuna's journal storage, from which the same command resumes after a kill.",
        metavar="FILE",
    )
    jobs: int | None = setting(None, JOBS_HELP, low=1)


def tune(options: TuneOptions, costs: CostSettings) -> Answer:
    """Find a policy's best settings.

    Settings are searched on one part of the trace and reported on the other; those given with --set are not searched.
    The result is compared with the baseline, the policy's default settings, the best fixed K and the runner-up of the
    search: each with the difference in speedup, paired over sequences. A warning names those from which the tuned
    policy does not differ significantly (95 %). Ctrl-C ends the search with the best so far; a second one ends the
    command.

    Example: specsim tune TRACE --policy adaedl --cost profile.json --trials 200
    """
    from specsim.learn.settings import SearchSettings
    from specsim.learn.tune import cross_validate_with, tune_on, tune_with
    from specsim.policy.registry import find_policy
    from specsim.replaying.priced import PricedTrace
    from specsim.trace.split import fold_sequences

    whole, folds, seed = PricedTrace(options.read(options.trace), costs.read()), options.folds, options.seed
    described = costs.cost_facts(costs.cost, whole.cost)
    search = SearchSettings(options.search, options.trials, seed, options.jobs, options.storage, options.settings)
    if folds is None:
        with _resuming_from(options.storage), progress_bar() as report:
            progress = partial(report, "tune")
            result = tune_with(whole, options.policy, search, tuning_share=options.tuning_share, progress=progress)
        return Answer({**result.as_dict(), **described}, partial(_print_tuned, result))
    kind = find_policy(options.policy)
    fold_sequences(whole.trace, folds, seed=seed)  # rejects a bad number before any work
    with _resuming_from(options.storage), progress_bar() as report:
        final = tune_on(kind, whole, whole, search, compare=False, progress=partial(report, "all sequences"))
        folded = cross_validate_with(whole, kind, search, folds=folds, progress=partial(report, "folds"))
    return Answer({**folded_document(final, folded), **described}, partial(_print_folded, final, folded))


@contextmanager
def _resuming_from(storage: Path | None) -> Iterator[None]:
    """If Ctrl-C leaves nothing to show, name the file to resume from."""
    try:
        yield
    except KeyboardInterrupt:
        if storage is None:
            raise
        raise Interrupted(f"the configurations tried are in {storage}; the same command goes on") from None


def _print_tuned(result: TuneResult) -> None:
    from specsim.report.page import speculation_text

    parts = f"{result.tuned_on} sequences, reported on {result.reported_on} held-out ones"
    title = f"{result.best.name}: {result.trials} trials on {parts}"
    speedup = f"{result.train.speedup.estimate:.3f}"
    _print(title + _aside(result), speedup, result.holdout, result.references, result.best)
    print(speculation_text(f"{result.best.name}, tuned", result.holdout.speedup.as_dict()))
    print_notes(result.warnings, "warning")


def folded_document(final: TuneResult, folded: CrossValidation) -> dict[str, Any]:
    """Settings tuned on all sequences, with the cross-validated estimate of their speedup."""
    document = {**final.as_dict(), **folded.as_dict()}
    document["holdout"] = {**document.pop("estimate"), "params": final.best.settings}
    document["interrupted"] = final.interrupted or folded.interrupted
    return document


def _print_folded(final: TuneResult, folded: CrossValidation) -> None:
    from specsim.report.page import speculation_text

    sequences = sum(fold.sequences for fold in folded.folds)
    title = f"{final.best.name}: {final.trials} trials on all sequences, cross-validated in {len(folded.folds)} folds"
    if folded.interrupted:
        title += f" of {sequences} sequences (interrupted)"
    speedup = f"{final.train.speedup.estimate:.3f}"
    _print(title + _aside(final), speedup, folded.estimate, folded.references, final.best, str(final.best))
    rows = [
        [
            str(number),
            str(fold.sequences),
            f"{fold.train_speedup:.3f}",
            f"{fold.holdout_speedup:.3f}",
            str(fold.search_result.best),
        ]
        for number, fold in enumerate(folded.folds, start=1)
    ]
    print(speculation_text(f"{final.best.name}, tuned", folded.estimate.speedup.as_dict()))
    print_table("folds", ["fold", "sequences", "tuning speedup", "held-out speedup", "policy"], rows)
    print_notes(folded.warnings, "warning")


def _aside(result: TuneResult) -> str:
    parts = [result.search]
    if result.refused:
        parts.append(f"{result.refused} that trace or costs cannot serve")
    if result.interrupted:
        parts.append("interrupted, best so far")
    return f" ({', '.join(parts)})"


def _print(
    title: str,
    train_speedup: str,
    tuned: Prediction,
    references: Mapping[str, Reference],
    best: Policy,
    shown: str | None = None,
) -> None:
    """shown : the policy, where it is another than was reported on"""
    from specsim.learn.tune import CALLED
    from specsim.policy.chain.fixed_k import FixedK
    from specsim.replaying.prediction import oracle_name

    regret = "" if tuned.oracle_regret is None else f"{100 * tuned.oracle_regret:.1f} %"
    rows = [
        ["baseline", "", "1.000", *[""] * 4],
        ["tuned", train_speedup, str(tuned.speedup), "", f"{tuned.tau:.2f}", regret, shown or str(tuned.policy)],
    ]
    for name, reference in references.items():
        other = reference.prediction
        regret = "" if other.oracle_regret is None else f"{100 * other.oracle_regret:.1f} %"
        gain = str(reference.comparison.difference)
        label = CALLED[name].removeprefix("the ")
        rows.append([label, "", str(other.speedup), gain, f"{other.tau:.2f}", regret, str(other.policy)])
    title = "; ".join([title, *tuned.notes])
    regret_of = f"gap to the oracle of {oracle_name([type(best), FixedK])}"
    columns = ["", "tuning speedup", "held-out speedup [95 % interval]", "tuned gains", "tau", regret_of, "policy"]
    print_table(title, columns, rows)
