"""`specsim tune`: search a policy's settings on one part of a trace, report on the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli.console import parse_settings, print_json, print_table, progress_bar
from specsim.cli.options import (
    BatchOption,
    CostOption,
    DraftCostOption,
    JsonOption,
    PolicyOption,
    SeedOption,
    SetOption,
    TraceArgument,
    read_costs,
)
from specsim.errors import Interrupted

if TYPE_CHECKING:
    from specsim.policy.base import Policy
    from specsim.speedup.prediction import Prediction
    from specsim.tuning.crossval import CrossValidation
    from specsim.tuning.search import Reference, TuneResult


class SearchKind(StrEnum):
    """How `tune` searches."""

    grid = "grid"
    race = "race"
    optuna = "optuna"


def tune(
    trace: TraceArgument,
    policy: PolicyOption,
    cost: CostOption,
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    set_: SetOption = [],  # noqa: B006 (typer reads the default, it is never changed)
    search: Annotated[
        SearchKind | None,
        typer.Option(
            help="grid: an even grid, every point on all sequences. race: many points on few sequences, the poor "
            "ones dropped as sequences are added; a tenth of the work. optuna: Optuna's TPE. "
            "Default: optuna for up to 500 trials where it is installed, else race.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option(help="Configurations to try.", min=1)] = 100,
    tuning_share: Annotated[float, typer.Option(help="Share of the sequences to tune on.")] = 0.5,
    folds: Annotated[
        int | None,
        typer.Option(
            help="Cross-validate: tune N times, each time report on another Nth of the sequences. The settings "
            "given then come from all sequences, the hold-out figures from the N folds.",
            metavar="N",
            min=2,
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        Path | None,
        typer.Option(
            help="Journal of the search. Run the same command again after a kill, and it goes on from there; "
            "with --folds each fold has its own, FILE.1 and so on.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Threads; default one per core. The answer is the same.", min=1)
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Find a policy's best settings on one part of the trace, report them on the other.

    Settings given with --set are not searched. Beside the result stand the autoregressive
    baseline, the policy's default settings, the best fixed K, and the runner-up of the search,
    each with the difference in speedup, paired over sequences. A warning names those from which
    the tuned policy does not differ significantly (95 %). Ctrl-C ends the search with the best
    so far; a second one ends the command.

    Example: specsim tune TRACE --policy adaedl --cost profile.json --search race --trials 2000
    """
    from specsim.api.tune import tune_with
    from specsim.policy.registry import find_policy
    from specsim.replaying.priced import PricedTrace
    from specsim.trace.files import read_trace
    from specsim.tuning.crossval import cross_validate, fold_sequences
    from specsim.tuning.search import tune as run_tune
    from specsim.tuning.settings import SearchSettings

    whole = PricedTrace(read_trace(trace), read_costs(cost, draft_cost, batch))
    settings = SearchSettings(search.value if search else None, trials, seed, jobs, storage, parse_settings(set_))
    if folds is None:
        with _kept_in(storage), progress_bar() as report:
            result = tune_with(whole, policy, settings, tuning_share=tuning_share, progress=partial(report, "tune"))
        show_tuned(result, json=json)
        return
    kind = find_policy(policy)
    fold_sequences(whole.trace, folds, seed=seed)  # names a bad number before any work
    with _kept_in(storage), progress_bar() as report:
        final = run_tune(kind, whole, whole, settings, compare=False, progress=partial(report, "all sequences"))
        folded = cross_validate(kind, whole, settings, folds=folds, progress=partial(report, "folds"))
    show_folded(final, folded, json=json)


@contextmanager
def _kept_in(storage: Path | None) -> Iterator[None]:
    """Say, where Ctrl-C leaves nothing to show, what the journal keeps."""
    try:
        yield
    except KeyboardInterrupt:
        if storage is None:
            raise
        raise Interrupted(f"what was tried is kept in {storage}; the same command goes on") from None


def show_tuned(result: TuneResult, *, json: bool) -> None:
    """Print a result with what it was compared with."""
    if json:
        print_json(result.as_dict())
        return
    from specsim.report.page import speculation_text

    parts = f"{result.tuned_on} sequences, reported on {result.reported_on} others"
    title = f"{result.best.name}: {result.trials} trials on {parts}"
    speedup = f"{result.train.speedup.estimate:.3f}"
    _print(title + _aside(result), speedup, result.holdout, result.references, result.best)
    print(speculation_text(f"{result.best.name}, tuned", result.holdout.speedup.as_dict()))
    _print_warnings(result.warnings)


def show_folded(final: TuneResult, folded: CrossValidation, *, json: bool) -> None:
    """Print settings tuned on all sequences with the cross-validated estimate of what they gain."""
    if json:
        document = {**final.as_dict(), **folded.as_dict()}
        document["holdout"] = {**document.pop("estimate"), "params": final.best.settings}
        document["interrupted"] = final.interrupted or folded.interrupted
        print_json(document)
        return
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
            str(fold.found.best),
        ]
        for number, fold in enumerate(folded.folds, start=1)
    ]
    print(speculation_text(f"{final.best.name}, tuned", folded.estimate.speedup.as_dict()))
    print_table("folds", ["fold", "sequences", "tuning speedup", "hold-out speedup", "policy"], rows)
    _print_warnings(folded.warnings)


def _aside(result: TuneResult) -> str:
    parts = [result.search]
    if result.work < 1:
        parts.append(f"{100 * result.work:.0f} % of brute force's work")
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
    from specsim.policy.chain.fixed_k import FixedK
    from specsim.speedup.prediction import oracle_name
    from specsim.tuning.search import CALLED

    regret = "" if tuned.oracle_regret is None else f"{100 * tuned.oracle_regret:.1f} %"
    rows = [
        ["autoregressive", "", "1.000", *[""] * 4],
        ["tuned", train_speedup, str(tuned.speedup), "", f"{tuned.tau:.2f}", regret, shown or str(tuned.policy)],
    ]
    for name, one in references.items():
        other = one.prediction
        regret = "" if other.oracle_regret is None else f"{100 * other.oracle_regret:.1f} %"
        gain = str(one.comparison.difference)
        label = CALLED[name].removeprefix("the ")
        rows.append([label, "", str(other.speedup), gain, f"{other.tau:.2f}", regret, str(other.policy)])
    title = "; ".join([title, *tuned.notes])
    regret_of = f"gap to the oracle of {oracle_name([type(best), FixedK])}"
    columns = ["", "tuning speedup", "hold-out speedup [95 % interval]", "tuned gains", "tau", regret_of, "policy"]
    print_table(title, columns, rows)


def _print_warnings(warnings: tuple[str, ...]) -> None:
    for warning in warnings:
        print(f"warning: {warning}")
