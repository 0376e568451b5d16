"""`specsim tune`: search a policy's settings on a part of a trace, report on the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specsim.cli.command import Answer
from specsim.cli.console import print_notes, print_table, progress_bar
from specsim.cli.options import JOBS_HELP, CostSettings, PolicySettings, SplitSettings, TraceSettings
from specsim.io.errors import Interrupted
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.learn.tune import TuneResult


@dataclass(frozen=True, kw_only=True)
class TuneOptions(SplitSettings, PolicySettings, TraceSettings):
    """Which policy is tuned, and how."""

    search: Literal["optuna", "grid"] = setting(
        "optuna", "Optuna's TPE, or an even grid. A space of at most --trials points is enumerated either way."
    )
    trials: int = setting(100, "Configurations to try.", low=1)
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
    from specsim.learn.tune import tune_with
    from specsim.replaying.priced import PricedTrace

    whole = PricedTrace(options.read(options.trace), costs.read())
    described = costs.cost_facts(costs.cost, whole.cost)
    search = SearchSettings(
        options.search, options.trials, options.seed, options.jobs, options.storage, options.settings
    )
    with _resuming_from(options.storage), progress_bar() as report:
        progress = partial(report, "tune")
        result = tune_with(whole, options.policy, search, tuning_share=options.tuning_share, progress=progress)
    return Answer({**result.as_dict(), **described}, partial(_print_tuned, result))


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
    from specsim.learn.tune import CALLED
    from specsim.policy.chain.fixed_k import FixedK
    from specsim.replaying.prediction import oracle_name
    from specsim.report.page import speculation_text

    tuned = result.holdout
    regret = "" if tuned.oracle_regret is None else f"{100 * tuned.oracle_regret:.1f} %"
    train_speedup = f"{result.train.speedup.estimate:.3f}"
    rows = [
        ["baseline", "", "1.000", *[""] * 4],
        ["tuned", train_speedup, str(tuned.speedup), "", f"{tuned.tau:.2f}", regret, str(tuned.policy)],
    ]
    for name, reference in result.references.items():
        other = reference.prediction
        regret = "" if other.oracle_regret is None else f"{100 * other.oracle_regret:.1f} %"
        gain = str(reference.comparison.difference)
        label = CALLED[name].removeprefix("the ")
        rows.append([label, "", str(other.speedup), gain, f"{other.tau:.2f}", regret, str(other.policy)])
    parts = f"{result.tuned_on} sequences, reported on {result.reported_on} held-out ones"
    title = f"{result.best.name}: {result.trials} trials on {parts}{_aside(result)}"
    regret_of = f"gap to the oracle of {oracle_name([type(result.best), FixedK])}"
    columns = ["", "tuning speedup", "held-out speedup [95 % interval]", "tuned gains", "tau", regret_of, "policy"]
    print_table("; ".join([title, *tuned.notes]), columns, rows)
    print(speculation_text(f"{result.best.name}, tuned", tuned.speedup))
    print_notes(result.warnings, "warning")


def _aside(result: TuneResult) -> str:
    parts = [result.search]
    if result.refused:
        parts.append(f"{result.refused} that trace or costs cannot serve")
    if result.interrupted:
        parts.append("interrupted, best so far")
    return f" ({', '.join(parts)})"
