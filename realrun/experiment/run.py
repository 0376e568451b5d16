"""`realrun validate` from end to end, with its files: of a pair, or of several drafters over a target (`--join`).

Of several, each drafter is recorded and profiled alone, as ever; their traces are joined, and each switching policy,
and each drafter alone, is tuned on the tuning prompts. On the held-out prompts all of them really decode, in turns of a
few rounds over the target, and what rounds cost meanwhile prices the prediction, each round by its drafter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from realrun.experiment.forecast import (
    ANEW,
    DRAWN,
    ForecastCosts,
    costs_before,
    forecast_costs,
    probed,
    run_error,
    speedups_on,
    tuning_profile,
)
from realrun.experiment.measuring import Measurement
from realrun.experiment.pipeline import (
    IDENTITY,
    OTHER,
    UNFINISHED,
    Contender,
    Outcome,
    Validation,
    about_prompts,
    identity_of,
    log,
)
from realrun.experiment.settings import Candidate, ValidationSettings
from realrun.experiment.validate import (
    Promise,
    accepted_histogram,
    compared,
    domains,
    errors_of,
    forecasts_of,
    k_curve,
    measured_facts,
    median_error,
    reliability,
    rounds_table,
    validated_rows,
)
from realrun.kept_files import claim, read_own
from realrun.lm.variants import expansion_of
from realrun.pairs.joined import join_pairs
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.files import cost_path
from specsim.cost.joined import JoinedCost, joined_document
from specsim.cost.model import CostModel
from specsim.cost.probe import Probe, changes
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import file_digest, replacing, write_json, write_table, write_text
from specsim.io.progress import Progress
from specsim.learn.search import best_policy
from specsim.policy.base import Policy
from specsim.policy.registry import SWITCH_POLICIES
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.replaying.intervals import beyond_floor, paired_difference
from specsim.replaying.prediction import oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.report.experiment import (
    Change,
    Difference,
    JoinedRow,
    JoinedValidation,
    MachineState,
    PromptCounts,
    Skipped,
    Switching,
    Time,
)
from specsim.report.experiment import Validation as Validated
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace

PAIR = "pair"  # the only contender
PROBE, PROFILE = "probe.json", "tuning_profile.json"  # in the folder of an unfinished validation
JOINED = "joined"  # the only contender of several drafters


def validate(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    out: Path,
    progress: Progress = lambda what, done, total: None,
) -> Validated:
    """Record, profile, tune and forecast on one part of the prompts, then decode the other for real, and compare.

    Parameters
    ----------
    pair : Pair
    prompts : sequence of Prompt
    settings : ValidationSettings
    out : Path
        Folder for trace, profile, rounds, validation.json and report.html; a trace that is there is used again. Of a
        validation that was interrupted so are the policies it had tuned and the sequences it had decoded.
        tuning_profile.json, tuned.json and forecast.json hold what was known before the first held-out token was
        decoded: costs, policies, and the speedups that these forecast.
    progress : callable, optional
        Told (what, done, total).

    Returns
    -------
    Validation
        What validation.json holds: a row for each policy with forecast and measured speedup, their intervals, and the
        share of rounds that are identical in replay and real run.

    Raises
    ------
    InputError
        If the folder holds a trace or an unfinished validation of other settings, or there are too few prompts.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import realrun
    >>> from realrun.pairs.prompts import lab_prompts
    >>> from specsim.policy.registry import POLICIES
    >>> pair = realrun.load_pair(drafter="prompt-lookup", threads=1)
    >>> record = realrun.RecordSettings(max_draft_tokens=2, max_new_tokens=8)
    >>> settings = realrun.ValidationSettings(record, (POLICIES["fixed_k"],), trials=2, minutes=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out, prompts = Path(folder) / "validation", lab_prompts(pair.tokenizer, 4)
    ...     validation = realrun.validate(pair, prompts, settings, out)
    >>> validation.rows[0].rounds_identical_percent
    100.0
    """
    work = out / UNFINISHED
    experiment = _Validation(pair, prompts, settings, out, work, progress)
    experiment.begin(out)
    outcome = experiment.run()
    rows, measurement = validated_rows(outcome, settings.seed), outcome.measured
    holdout, ((profile,),) = outcome.holdouts[PAIR], outcome.profiles.values()
    after = probed(pair, prompts, settings, experiment.before, progress)
    write_json(profile.as_dict(), out / "profile.json")
    priced = PricedTrace(holdout, profile.cost)
    arm = measurement.fastest
    replayed = priced.replay(outcome.entries[arm - 1].candidate.policy, seed=settings.seed, log=True)
    changed = [Change(*change) for change in changes(experiment.state, after)]
    counts = PromptCounts(len(prompts), len(experiment.prompts), holdout.sequences)
    errors_percent = [row.error_percent for row in rows]
    validation = Validated(
        target=holdout.meta["target"],
        drafter=holdout.meta["drafter"],
        drafter_kind=holdout.meta.get("drafter_kind", "model"),
        drafter_facts=holdout.meta.get("drafter_facts", {}),
        block_expansion=expansion_of(pair.target),
        device=str(pair.environment["device"]),
        dtype=str(pair.environment["dtype"]),
        decoding=holdout.meta["decoding"],
        environment=pair.environment,
        sequences=outcome.forecast.sequences,
        forecast=outcome.forecast.facts,
        output_tokens=int(holdout.output_tokens.sum()),
        distinct_trigram_share=holdout.meta["distinct_trigram_share"],
        first_token_accepted_share=holdout.meta["first_token_accepted_share"],
        autoregressive_sequence_seconds=measurement.seconds[0].tolist(),
        **measured_facts(measurement, forecasts_of(rows))._asdict(),
        rows=rows,
        median_abs_error_percent=median_error(errors_percent),
        p90_abs_error_percent=float(np.quantile(np.abs(errors_percent), 0.9)),
        errors=errors_of(rows, [row.measured for row in rows], [row.predicted for row in rows]),
        k_curve=k_curve(priced, settings.seed),
        accepted_histogram=accepted_histogram(replayed, measurement.last_runs(arm), holdout.depth),
        reliability=reliability(holdout),
        domains=domains(holdout, replayed, measurement.seconds[0], measurement.seconds[arm]),
        machine_state=MachineState(experiment.state.document, after.document, changed),
        time=Time(settings.minutes, time.monotonic() - experiment.begun_s, counts),
        skipped=[Skipped(policy=policy, reason=reason) for _, policy, reason in outcome.skipped],
        prompts=about_prompts(experiment.prompts, settings),
        options=settings.options(measurement.repeats),
    )
    with replacing(out / "rounds.parquet") as temporary:
        write_table(rounds_table(outcome), temporary)
    write_json(validation.as_dict(), out / "validation.json")
    from specsim.report.validation import render_validation  # matplotlib is slow to load

    write_text(out / "report.html", render_validation(validation))
    experiment.finish(out)
    return validation


class _Validation(Validation):
    """A validation of a pair, whose costs may be from before."""

    settings: ValidationSettings

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        settings: ValidationSettings,
        out: Path,
        work: Path,
        progress: Progress,
    ):
        self.before = costs_before(settings)
        contender = Contender(pair, {settings.trace or out / "trace": pair}, settings.record)
        super().__init__({PAIR: contender}, pair, prompts, settings, work, progress, overwrite=settings.overwrite)

    def begin(self, out: Path) -> None:
        super().begin(out)
        if self.overwrite or not any(folder.exists() for folder in self.traces):
            _ = self.state  # probed and told first; a trace that is there is read first, as it may be refused

    @cached_property
    def state(self) -> Probe:
        path = self.folder / PROBE
        if not path.is_file():  # of an earlier start, whose policies were tuned at that state
            state = probed(self.plain, self.given, self.settings, self.before, self.progress)
            write_json(state.as_dict(), path)
        state = Probe.from_json(read_own(path, again=ANEW), str(path))
        step_s = state.decoding_step_s
        log.info(f"without speculation: {1 / step_s:.1f} tokens per second, {1e3 * step_s:.1f} ms per token")
        return state

    def claim(self) -> None:
        cost = None if self.settings.cost is None else file_digest(cost_path(self.settings.cost))
        identity = {**identity_of(self.plain, self.prompts, self.settings), "cost": cost}
        claim(self.folder / IDENTITY, identity, f"{self.folder} holds an unfinished validation", OTHER)

    def costs(self) -> Mapping[str, ForecastCosts]:
        path = self.folder / PROFILE
        return {
            PAIR: forecast_costs(self.plain, self.prompts, self.settings, self.before, self.state, path, self.progress)
        }


def validate_joined(
    pairs: Sequence[Pair],
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    out: Path,
    progress: Progress = lambda what, done, total: None,
) -> JoinedValidation:
    """Tune switching policies and every drafter alone on one part of the prompts, predict and decode the other.

    Parameters
    ----------
    pairs : sequence of Pair
        Of the same target; their order is that of the drafters' numbers; see `realrun.pairs.joined.join_pairs`.
    prompts, settings, out, progress
        As of `validate`; a trace is kept for every drafter.

    Returns
    -------
    JoinedValidation
        What validation.json holds: a row for each policy, and as `switching` the best switching policy against the best
        single drafter, both chosen on the tuning part, predicted and measured on the other with intervals.

    Raises
    ------
    InputError
        As of `validate` and of `join_pairs`.
    """
    joined = join_pairs(pairs)
    if settings.record.tree_nodes:
        raise InputError("switching policies draft chains; validate several drafters with --tree-nodes 0")
    if settings.record.sampler.mode == "rejection":
        raise InputError(
            "a validation of several drafters compares outputs and rounds with the replay, but under rejection "
            "sampling every run draws its own text; choose --mode greedy-draft"
        )
    settings = replace(settings, kinds=tuple(settings.kinds or SWITCH_POLICIES.values()))
    folders = {trace_folder(out, number): pair for number, pair in enumerate(pairs, start=1)}
    contenders = {JOINED: Contender(joined, folders, settings.record)}
    work = out / UNFINISHED
    experiment = _JoinedValidation(contenders, joined, prompts, settings, work, progress, overwrite=settings.overwrite)
    experiment.begin(out)
    outcome = experiment.run()
    holdout, measurement = outcome.holdouts[JOINED], outcome.measured
    assert isinstance(holdout, JoinedTrace)
    priced = PricedTrace(holdout, outcome.run_cost(JOINED))
    chosen = [entry.candidate for entry in outcome.entries]
    replays = [priced.replay(candidate.policy, seed=settings.seed, log=True) for candidate in chosen]
    rows = _joined_rows(outcome, holdout, replays, oracle_seconds(priced, [OneDrafter]), settings.seed)
    promises = [
        Promise(str(candidate.policy), candidate.train_speedup or 0.0, own_s)
        for candidate, own_s in zip(chosen, measurement.seconds[1:-1], strict=True)
    ]
    validation = JoinedValidation(
        target=joined.target_name,
        drafters=[pair.draft_name for pair in pairs],
        decoding=settings.record.sampler.as_dict(),
        environment=joined.environment,
        sequences=outcome.forecast.sequences,
        forecast=outcome.forecast.facts,
        output_tokens=int(holdout.output_tokens.sum()),
        **measured_facts(measurement, promises)._asdict(),
        rows=sorted(rows, key=lambda row: -row.measured),
        median_abs_error_percent=median_error([row.error_percent for row in rows]),
        errors=errors_of(rows, [row.measured for row in rows], [row.predicted for row in rows]),
        switching=_switching(chosen, replays, measurement),
        skipped=[Skipped(policy=policy, reason=reason) for _, policy, reason in outcome.skipped],
        prompts=about_prompts(prompts, settings),
        options=settings.options(measurement.repeats),
    )
    write_json(joined_document([profile.as_dict() for profile in outcome.profiles[JOINED]]), out / "cost.json")
    write_json(validation.as_dict(), out / "validation.json")
    experiment.finish(out)
    return validation


def trace_folder(out: Path, number: int) -> Path:
    """Name the folder of a drafter's trace. number : of the drafter, from 1"""
    return out / f"trace-{number}"


class _JoinedValidation(Validation):
    """A validation of drafters that take turns: each alone, then the policies that switch."""

    @property
    def pairs(self) -> list[Pair]:
        return [*self.contenders[JOINED].parts.values()]

    def claim(self) -> None:
        identity = {
            f"drafter {number}": {**identity_of(pair, self.prompts, self.settings), "cost": None}
            for number, pair in enumerate(self.pairs, start=1)
        }
        claim(self.folder / IDENTITY, identity, f"{self.folder} holds an unfinished validation", OTHER)

    def costs(self) -> Mapping[str, ForecastCosts]:
        profiles = [
            tuning_profile(
                pair, self.prompts, self.settings, self.folder / f"tuning_profile-{number}.json", self.progress
            )
            for number, pair in enumerate(self.pairs, start=1)
        ]
        drawn = zip(*(profile.draws(DRAWN, self.settings.seed) for profile in profiles), strict=True)
        return {
            JOINED: ForecastCosts(
                self.contenders[JOINED].cost(profiles),
                {"source": "measured just before"},
                max(run_error(profile.others_percent) for profile in profiles),
                drawn=[JoinedCost(costs) for costs in drawn],
            )
        }

    def tune(self, name: str, train: Trace, cost: CostModel) -> list[Candidate]:
        """Tune every drafter alone, then every switching policy."""
        priced = PricedTrace(train, cost)
        alone = [
            best_policy(OneDrafter, priced, replace(self.search, fixed={"drafter": number}))
            for number in range(1, len(self.pairs) + 1)
        ]
        speedups = [priced.replay(policy, seed=self.settings.seed).speedup for policy in alone]
        return [
            *(Candidate(policy, "alone", speedup) for policy, speedup in zip(alone, speedups, strict=True)),
            *super().tune(name, train, cost),
        ]

    @property
    def kinds(self) -> list[type[Policy]]:
        return [kind for kind in self.settings.policies if kind is not OneDrafter]


def _joined_rows(
    outcome: Outcome, trace: JoinedTrace, replays: Sequence[Replay], oracle_s: Floats, seed: int
) -> list[JoinedRow]:
    """Compare each policy's replay and forecast with its measurement."""
    measurement, known = outcome.measured, outcome.partly_known(JOINED)
    rows = []
    for arm, (entry, replayed) in enumerate(zip(outcome.entries, replays, strict=True), start=1):
        policy, predicted, measured = entry.candidate.policy, summarise(replayed, oracle_s), measurement.speedups[arm]
        speedups = speedups_on(known, policy, seed)
        rounds = [round_ for run in measurement.last_runs(arm) for round_ in run.rounds]
        drafters = [round_.drafter for round_ in rounds if round_.drafter]
        rows.append(
            JoinedRow(
                policy=policy.name,
                label=str(policy),
                params=policy.settings,
                role=entry.candidate.role,
                predicted=predicted.speedup,
                train_speedup=entry.candidate.train_speedup,
                **compared(measurement, arm, measured, predicted.speedup, replayed, trace)._asdict(),
                oracle_regret=predicted.oracle_regret,
                tau=predicted.tau,
                rounds_of_drafters=np.bincount(drafters, minlength=len(trace.parts) + 1)[1:].tolist(),
                forecast=entry.forecast.forecast,
                text_known=speedups["text_known"],
                costs_known=speedups["costs_known"],
            )
        )
    return rows


def _switching(chosen: Sequence[Candidate], replays: Sequence[Replay], measurement: Measurement) -> Switching:
    """Compare the forecast's best switching policy with its best single drafter, predicted and measured."""

    def best(*, alone: bool) -> int:
        numbers = [number for number, candidate in enumerate(chosen) if (candidate.role == "alone") is alone]
        return max(numbers, key=lambda number: (chosen[number].train_speedup or 0.0, number))

    single, switch = best(alone=True), best(alone=False)
    baseline_s, *arms_s, _ = measurement.seconds
    measured = paired_difference(baseline_s, arms_s[switch], arms_s[single])
    predicted = paired_difference(
        replays[switch].autoregressive_s, replays[switch].speculative_s, replays[single].speculative_s
    )
    speedups = [measurement.speedups[1 + number] for number in (switch, single)]
    return Switching(
        best_single=str(chosen[single].policy),
        best_switch=str(chosen[switch].policy),
        predicted=Difference.of(predicted),
        measured=Difference.of(measured),
        resolved=measured.significant and beyond_floor(measurement.noise_floor_percent, *speedups),
    )
