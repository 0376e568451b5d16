"""`realrun engine validate` from end to end: an engine profiled by a few settings, others predicted and measured.

All settings take turns, prompt by prompt, in one process: drift of the machine affects all of them equally, and
costs come from the same minutes as what they predict. Two of the settings are without speculation; their ratio would
be 1 on a machine without noise (the null arm).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import make_interp_spline

from realrun.engines.compare import ANY_COST
from realrun.engines.engine import Engine, Job, Setting, Turn
from realrun.experiment.timing import check_repeats
from realrun.experiment.validate import Promise, choice_of
from realrun.machine_load import Load, load_from, watch
from realrun.measure.reuse import prompts_of
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.provenance import provenance
from specsim.engines.as_engine import as_engine
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.replaying.intervals import Estimate, noise_floor_percent, ratio_interval
from specsim.replaying.priced import PricedTrace
from specsim.report.experiment import Choice
from specsim.trace.trace import Trace

BASELINE = Setting(0)


class Rounds(NamedTuple):
    """A sequence's rounds: passes of the draft model, and drafted tokens that the target verified [R]."""

    passes: Ints
    verified: Ints


class Timed(NamedTuple):
    """A sequence's rounds, the seconds that they took in all, and those of them that went into drafts."""

    rounds: Rounds
    whole_s: float
    draft_s: float


@dataclass(frozen=True)
class EngineCosts:
    """Seconds of an engine's rounds, at the contexts that were timed.

    draft_s, pass_s : a draft takes draft_s and, for every pass of the draft model, pass_s
    verified : tokens of the target's pass beside the pending one, from 0 on
    round_s : seconds of a round of so many beside its draft; between these numbers and beyond the last, linear
    """

    draft_s: float
    pass_s: float
    verified: tuple[int, ...]
    round_s: tuple[float, ...]

    def seconds(self, rounds: Rounds) -> float:
        """Return the seconds of these rounds."""
        drafting = self.draft_s * np.count_nonzero(rounds.passes) + self.pass_s * rounds.passes.sum()
        return float(drafting + (_shares(rounds.verified, self.verified) @ np.array(self.round_s)).sum())


def fit_costs(timed: Sequence[Timed], verified: Sequence[int]) -> EngineCosts:
    """Fit costs by least squares over sequences that were timed in several settings.

    timed : of no speculation, and of several draft lengths
    verified : numbers of verified tokens at which a round's seconds are to be known, 0 and the draft lengths
    """
    places = tuple(sorted({0, *verified}))
    drafts = np.array([[np.count_nonzero(run.rounds.passes), run.rounds.passes.sum()] for run in timed], np.float64)
    draft_s, pass_s = _solved(drafts, [run.draft_s for run in timed])
    counts = np.array([_shares(run.rounds.verified, places).sum(axis=0) for run in timed])
    round_s = _solved(counts, [run.whole_s - run.draft_s for run in timed])
    return EngineCosts(draft_s, pass_s, places, tuple(round_s))


def _solved(counts: Floats, seconds: Sequence[float]) -> list[float]:
    return [float(value) for value in np.linalg.lstsq(counts, np.array(seconds), rcond=None)[0]]


def _shares(verified: Ints, places: Sequence[int]) -> Floats:
    """Compute the weights of the grid's lengths for rounds of these lengths [R, places]: linear, rows sum to 1."""
    if len(places) == 1:  # a line takes two points
        return np.ones((len(verified), 1))
    return np.asarray(make_interp_spline(places, np.eye(len(places)), k=1)(verified))


class Plan(NamedTuple):
    """Settings that costs are read off, and those that are predicted."""

    profiled: list[Setting]
    predicted: list[Setting]

    @property
    def arms(self) -> list[Setting]:
        """All, between two baselines, of which the second is the null arm."""
        return [BASELINE, *self.profiled, *self.predicted, BASELINE]


def plan_of(profile_ks: Sequence[int], ks: Sequence[int], p_mins: Sequence[float]) -> Plan:
    """Plan draft lengths to profile and to predict, and p_min to predict with the longest of all.

    Raises InputError if a length is both profiled and predicted, or nothing is predicted.
    """
    longest = max([*profile_ks, *ks], default=0)
    if len({*profile_ks}) < 2 or min([*profile_ks, *ks]) < 1:
        raise InputError(f"--profile-k of {', '.join(map(str, profile_ks))}; give two draft lengths or more, from 1 on")
    if both := {*profile_ks} & {*ks}:
        raise InputError(f"K = {min(both)} is both profiled and predicted; leave it out of --k or of --profile-k")
    predicted = [*(Setting(k) for k in ks), *(Setting(longest, p_min) for p_min in p_mins)]
    if not predicted:
        raise InputError("there is nothing to predict; give --k or --p-min")
    return Plan([Setting(k) for k in profile_ks], predicted)


def turns_of(arms: int, prompts: int, repeats: int, seed: int) -> list[tuple[int, int]]:
    """(arm, prompt) of every turn: a round of warm-up, then all arms on each prompt, in an order drawn anew."""
    order = np.random.default_rng(seed)
    warm = [(arm, 0) for arm in range(arms)]
    return warm + [
        (int(arm), prompt) for _ in range(repeats) for prompt in range(prompts) for arm in order.permutation(arms)
    ]


def typical(turns: Sequence[tuple[int, int]], results: Sequence[Turn], arms: int, prompts: int) -> list[list[Turn]]:
    """Return the repeat of median seconds by arm and prompt; warm-up left out."""
    repeats: list[list[list[Turn]]] = [[[] for _ in range(prompts)] for _ in range(arms)]
    for (arm, prompt), turn in zip(turns[arms:], results[arms:], strict=True):
        repeats[arm][prompt].append(turn)
    return [
        [sorted(same, key=lambda turn: turn.whole_s)[len(same) // 2] for same in by_prompt] for by_prompt in repeats
    ]


def replayed_rounds(trace: Trace, engine: Engine, setting: Setting, max_new_tokens: int) -> list[Rounds]:
    """Replay the rounds of every sequence by the engine's conventions."""
    run = as_engine(trace, engine.conventions, max_output_tokens=max_new_tokens).trace
    if not setting.k:
        return [Rounds(*np.zeros((2, length), np.int64)) for length in run.output_tokens.tolist()]
    log = PricedTrace(run, ANY_COST).replay(engine.policy(setting), log=True).rounds
    assert log is not None
    return [Rounds(log.drafted[log.sequence == s], log.verified[log.sequence == s]) for s in range(trace.sequences)]


@dataclass(frozen=True)
class ForecastRow:
    """A setting's speed, predicted and measured. profiled : whether costs were read off it"""

    setting: Setting
    profiled: bool
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    measured_speedup: Estimate

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_tokens_per_second / self.measured_tokens_per_second - 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "setting": str(self.setting),
            "k": self.setting.k,
            "p_min": self.setting.p_min,
            "profiled": self.profiled,
            "predicted_tokens_per_second": self.predicted_tokens_per_second,
            "measured_tokens_per_second": self.measured_tokens_per_second,
            "error_percent": self.error_percent,
            "measured_speedup": self.measured_speedup.as_dict(),
        }


@dataclass(frozen=True)
class Forecasts:
    """Predictions of all settings beside their measurement. null_arm : speedup of the second baseline"""

    null_arm: Estimate
    rows: Sequence[ForecastRow]
    choice: Choice

    @property
    def errors_percent(self) -> list[float]:
        """Absolute errors of settings that were not profiled."""
        return [abs(row.error_percent) for row in self.rows if not row.profiled]

    def as_dict(self) -> dict[str, Any]:
        return {
            "null_arm": self.null_arm.as_dict(),
            "noise_floor_percent": noise_floor_percent(self.null_arm),
            "rows": [row.as_dict() for row in self.rows],
            "median_abs_error_percent": float(np.median(self.errors_percent)),
            "max_abs_error_percent": max(self.errors_percent),
            "choice": self.choice.as_dict(),
        }


@dataclass(frozen=True)
class EngineValidation:
    """An engine's tokens per second, predicted and measured."""

    engine: Engine
    target: str
    drafter: str
    prompts: Sequence[Prompt]
    max_new_tokens: int
    repeats: int
    costs: EngineCosts
    forecasts: Forecasts
    load: Load
    environment: dict[str, str | int]

    def as_dict(self) -> dict[str, Any]:
        """Make what `realrun engine validate --json` prints."""
        costs = self.costs
        return {
            "engine": self.engine.name,
            "version": self.engine.version(),
            "target": self.target,
            "drafter": self.drafter,
            "prompts": prompt_facts(self.prompts, "the trace's"),
            "max_new_tokens": self.max_new_tokens,
            "repeats": self.repeats,
            "costs": {
                "draft_s": costs.draft_s,
                "pass_s": costs.pass_s,
                "round_s": {str(n): s for n, s in zip(costs.verified, costs.round_s, strict=True)},
            },
            **self.forecasts.as_dict(),
            "load": self.load._asdict(),
            "environment": self.environment,
        }


def validate(
    pair: Pair,
    trace: Trace,
    engine: Engine,
    plan: Plan,
    max_new_tokens: int,
    *,
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> EngineValidation:
    """Predict an engine's tokens per second in settings that were not profiled, measure them, and compare.

    Parameters
    ----------
    pair : Pair
        The trace's own.
    trace : Trace
        Greedy, with its prompts; it decides which tokens are accepted.
    engine : Engine
    plan : Plan
    max_new_tokens : int
        The engine's limit on output tokens.
    repeats : int
        Timed runs of every prompt in every setting, of which the median counts: an odd number from 3 on.
    seed : int
        Of the settings' order.
    progress : callable, optional

    Returns
    -------
    EngineValidation

    Raises
    ------
    InputError
        If the engine's seconds cannot be read, or its outputs differ from the recorded texts.
    """
    check_repeats(repeats)
    prompts = prompts_of(trace, "the trace")
    arms = plan.arms
    turns = turns_of(len(arms), len(prompts), repeats, seed)
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), [prompt.tokens for prompt in prompts], max_new_tokens, pair.eos_token_ids)
        engine.convert(pair, job.folder)
        progress("run", 0, len(turns))
        load = watch()
        results = engine.run_timed(job, arms, turns, lambda done: progress("run", done, len(turns)))
        busy = load_from([load()])
    by_arm = typical(turns, results, len(arms), len(prompts))
    rounds = [replayed_rounds(trace, engine, arm, max_new_tokens) for arm in arms]
    costs = _costs(plan, by_arm, rounds)
    return EngineValidation(
        engine,
        pair.target_name,
        pair.draft_name,
        prompts,
        max_new_tokens,
        repeats,
        costs,
        compared(plan, by_arm, rounds, costs),
        busy,
        provenance(pair.device, pair.number_type),
    )


def _costs(plan: Plan, by_arm: Sequence[Sequence[Turn]], rounds: Sequence[Sequence[Rounds]]) -> EngineCosts:
    known = range(1 + len(plan.profiled))  # the baseline and what is profiled
    timed = [
        Timed(replayed, turn.whole_s, turn.draft_s)
        for arm in known
        for replayed, turn in zip(rounds[arm], by_arm[arm], strict=True)
    ]
    return fit_costs(timed, [setting.k for setting in plan.profiled])


def compared(
    plan: Plan, by_arm: Sequence[Sequence[Turn]], rounds: Sequence[Sequence[Rounds]], costs: EngineCosts
) -> Forecasts:
    """Compare predictions with measurements, setting by setting."""

    def seconds(arm: int) -> Floats:
        return np.array([turn.whole_s for turn in by_arm[arm]])

    baseline_s = seconds(0)
    null_arm = ratio_interval(baseline_s, seconds(-1))
    tokens = sum(turn.output_tokens for turn in by_arm[0])
    rows = []
    for arm, setting in enumerate(plan.arms[:-1]):
        predicted_s = np.array([costs.seconds(replayed) for replayed in rounds[arm]])
        measured_s = seconds(arm)
        predicted, measured = tokens / float(predicted_s.sum()), tokens / float(measured_s.sum())
        profiled, speedup = setting not in plan.predicted, ratio_interval(baseline_s, measured_s)
        rows.append(ForecastRow(setting, profiled, predicted, measured, speedup))
    alone = rows[0].predicted_tokens_per_second
    promises = [
        Promise(str(row.setting), row.predicted_tokens_per_second / alone, seconds(arm))
        for arm, row in enumerate(rows)
        if not row.profiled
    ]
    return Forecasts(null_arm, rows, choice_of(promises, baseline_s, noise_floor_percent(null_arm)))
