"""`realrun validate`: forecast against measured speedup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from realrun.cli.options import (
    OVERWRITE_HELP,
    PairSettings,
    RecordOptions,
    TimedSettings,
    TuneOptions,
    refuse_beside,
    working,
)
from specsim.cli.command import Answer
from specsim.cli.console import print_skipped, print_table
from specsim.io.settings import Settings, setting

if TYPE_CHECKING:
    from realrun.experiment.settings import ValidationSettings
    from realrun.pairs.prompts import Prompt
    from specsim.replaying.forecast import ErrorSummary
    from specsim.report.experiment import JoinedValidation, Validation

RECORDED = (*(field.name for field in fields(RecordOptions)), "overwrite")  # what --trace decides


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(Settings):
    """What to validate, and where."""

    out: Path = setting(Path("validation"), "Folder for trace, profile, result and report.")
    join: list[str] = setting(
        [],
        "Another drafter, ahead of --drafter: compares policies that choose a drafter per round with each drafter "
        "alone; repeat for a third.",
        metavar="DRAFTER",
    )
    trace: Path | None = setting(
        None, "Use this trace of the pair, made by `realrun record`, with its prompts and settings."
    )
    cost: Path | None = setting(
        None,
        "Forecast by these costs from before, a profile or a name of `specsim cost list`, in place of a profile made "
        "now; a probe of some seconds fits them to this machine.",
    )
    max_error: float | None = setting(None, "Exit with 1 if the forecasts' median error exceeds this many percent.")
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")

    def exact(self, errors: Mapping[str, ErrorSummary]) -> bool:
        """Tell whether the forecasts' errors are within --max-error."""
        return self.max_error is None or errors["forecast"].median_abs_percent <= self.max_error


def validate(
    ctx: typer.Context,
    job: ValidateOptions,
    pair: PairSettings,
    record: RecordOptions,
    tune: TuneOptions,
    machine: TimedSettings,
) -> Answer:
    """Forecast speedups, then measure them.

    Records the tuning prompts, profiles the machine, tunes every policy offline and writes forecast.json; then records
    and decodes the held-out prompts for real, and compares. With --tree-nodes, tree policies join the chain policies. A
    trace in the output folder that has the same settings is used again. After an interruption the same command goes on
    from validation.partial/. Writes trace/, forecast.json, profile.json, validation.json, rounds.parquet and
    report.html.

    With --join, several drafters share the target: each is recorded and profiled alone, then switching policies and
    each drafter alone are tuned, forecast and decoded for real, without a limit of time. Writes a trace per drafter,
    forecast.json, cost.json and validation.json.

    Exits with 1 where no difference exceeds the noise floor.

    Example: realrun validate --trace TRACE --target MODEL --draft-model SMALL_MODEL --out validation
    """
    from realrun.experiment.run import validate as run_validation
    from realrun.experiment.run import validate_joined
    from realrun.experiment.timing import check_repeats
    from realrun.measure.record import longest_prompt
    from realrun.pairs.joined import join_pairs

    machine.check()
    check_repeats(tune.repeats)
    if job.join:
        refuse_beside(ctx, "join", ("trace", "predictor", "cost", "minutes"))
    prompts, settings = _experiment(ctx, job, record, tune, pair.target)
    with working(job.out, machine, overwrite=job.overwrite) as report:
        last = pair.load(machine, **({"predictor": "none"} if job.join else {}))
        pairs = [*(pair.load(machine, predictor="none", drafter=name, beside=last) for name in job.join), last]
        joined = join_pairs(pairs) if job.join else last
        prompts = prompts or record.load(joined, longest_prompt(joined, record.max_new_tokens, record.max_draft_tokens))
        if job.join:
            together = validate_joined(pairs, prompts, settings, job.out, report)
            return Answer(together.as_dict(), partial(_print_joined, together, job.out), job.exact(together.errors))
        result = run_validation(joined, prompts, settings, job.out, report)
    conclusive = resolves_something(result)
    warning = "" if conclusive else inconclusive_text(result.noise_floor_percent)
    passed = conclusive and job.exact(result.errors)
    return Answer(result.as_dict(), partial(print_validation, result, job.out), passed, warning)


def _experiment(
    ctx: typer.Context, job: ValidateOptions, record: RecordOptions, tune: TuneOptions, target: str
) -> tuple[Sequence[Prompt] | None, ValidationSettings]:
    """The prompts, if known, and the settings."""
    from realrun.experiment.settings import ValidationSettings
    from realrun.measure.reuse import prompts_of, settings_of
    from specsim.policy.registry import POLICIES, SWITCH_POLICIES
    from specsim.trace.files import read_plain_trace

    prompts = None
    if job.trace is None:
        recording = record.settings(target, tune.seed)
    else:
        refuse_beside(ctx, "trace", RECORDED)
        trace = read_plain_trace(job.trace)
        prompts, recording = prompts_of(trace, str(job.trace)), settings_of(trace, str(job.trace))
    kinds = tune.kinds([*(SWITCH_POLICIES if job.join else POLICIES)])
    search = tune.search | ({"minutes": 0.0} if job.join else {})
    settings = ValidationSettings(recording, kinds, **search, overwrite=job.overwrite, trace=job.trace, cost=job.cost)
    return prompts, settings


def resolves_something(result: Validation) -> bool:
    """Whether any two rows, or the fastest and the baseline, differ by more than the noise floor."""
    from specsim.replaying.intervals import beyond_floor

    fastest = result.rows[0].measured
    return any(row.resolved is True for row in result.rows) or beyond_floor(result.noise_floor_percent, fastest, 1.0)


def inconclusive_text(floor_percent: float) -> str:
    """What to say of a validation whose differences are all below its noise floor."""
    return (
        f"inconclusive: all differences are below the noise floor ({floor_percent:.1f} %); run it again on a quieter "
        "machine, or with more prompts or repeats"
    )


def _print_joined(result: JoinedValidation, out: Path) -> None:
    from specsim.report.page import choice_text, floor_text, machine_text, speculation_text, wall_clock_text

    print(f"machine: {machine_text(result)}")
    print(floor_text(result.noise_floor_percent, result.null_arm))
    rows = [
        [
            row.label,
            f"{row.train_speedup:.3f}",
            str(row.measured),
            f"{row.wall_clock_speedup:.3f}",
            str(row.predicted),
            f"{row.error_percent:+.1f} %",
            f"{row.rounds_identical_percent:.2f} %",
            " / ".join(map(str, row.rounds_of_drafters)),
        ]
        for row in result.rows
    ]
    columns = [
        *("policy", "forecast", "measured speedup", "wall clock"),
        *("from own rounds", "error", "rounds identical", "rounds by drafter"),
    ]
    names = ", ".join(f"{number} {name}" for number, name in enumerate(result.drafters, start=1))
    title = f"{result.sequences.holdout} held-out sequences, 95 % intervals; drafters: {names}"
    print_table(title, columns, rows)
    print_skipped("not compared", [(line.policy, line.reason) for line in result.skipped])
    switching = result.switching
    print(f"best single drafter: {switching.best_single}; best switch: {switching.best_switch}")
    significance = "" if switching.resolved else ", which is not significant"
    print(
        f"the switch's speedup is higher by {switching.measured.difference}{significance}; from the run's own rounds "
        f"by {switching.predicted.difference}"
    )
    for line in wall_clock_text(result.rows):
        print(line)
    if result.choice:
        print(choice_text(result.choice))
    leader = result.rows[0]
    print(speculation_text(leader.label, leader.measured, result.noise_floor_percent))
    print(f"full result: {out / 'validation.json'}")


def print_validation(result: Validation, out: Path) -> None:
    """Print predicted and measured speedups as a table, and what qualifies them."""
    from specsim.report import page
    from specsim.report.documents import ERROR_COLUMNS, VALIDATION_COLUMNS, error_rows, validation_rows
    from specsim.report.table import as_text

    rows, floor_percent = result.rows, result.noise_floor_percent
    print(f"machine: {page.machine_text(result)}")
    print(page.floor_text(floor_percent, result.null_arm))
    print(f"prompts: {page.prompts_text(result.prompts)}")
    title = f"{result.sequences.holdout} held-out sequences, {result.output_tokens} tokens, 95 % intervals"
    print_table(title, *as_text(VALIDATION_COLUMNS, validation_rows(result)))
    print(f"measured: {page.repeats_text(result.options.repeats)}; wall clock: all repeats summed")
    for line in [*page.wall_clock_text(rows), *page.truncated_text((row.label, row.truncated_share) for row in rows)]:
        print(line)
    departures = [row.divergences.first for row in rows if row.divergences]
    if departures:
        counts = ", ".join(f"{sum(counts[cause] for counts in departures)} {cause}" for cause in departures[0])
        print(f"first differences from the replay, of sequences that have one: {counts}")
    print_skipped("not compared", [(line.policy, line.reason) for line in result.skipped])
    for line in (
        page.forecast_text(result.forecast, rows),
        page.state_text(result.machine_state),
        page.time_text(result.time),
    ):
        print(line)
    print_table("errors against the measurement", *as_text(ERROR_COLUMNS, error_rows(result.errors)))
    if result.choice:
        print(page.choice_text(result.choice))
    print(page.speculation_text(rows[0].label, rows[0].measured, floor_percent))
    print(f"report: {out / 'report.html'}")
