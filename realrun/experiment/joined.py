"""`realrun validate --join`: several drafters over a target, each alone and under policies that switch.

Every drafter is recorded and profiled alone, as ever; their traces are joined, and each switching policy, and each
drafter alone, is tuned on the tuning prompts. On the held-out prompts all of them really decode, in turns of a few
rounds over the target, and what rounds cost meanwhile prices the prediction, each round by the drafter that drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from realrun.experiment.document import Forecast, choice_of, errors_of, rate_of
from realrun.experiment.forecast import (
    ForecastCosts,
    drawn_costs,
    forecast,
    run_error,
    sealed_forecast,
    speedups_on,
    tuning_profile,
)
from realrun.experiment.measuring import Costs, MeasuredCosts, Measurement, Run, measure_in_turns
from realrun.experiment.run import (
    IDENTITY,
    OTHER,
    UNFINISHED,
    identity_of,
    keep_forecast,
)
from realrun.experiment.settings import Candidate, ValidationSettings
from realrun.experiment.validate import DECODED, TUNED, arms_of, candidates, compared
from realrun.kept_files import claim
from realrun.measure.reuse import check_job, recorded_trace
from realrun.pairs.joined import join_pairs
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.cost.joined import JoinedCost, joined_document
from specsim.cost.profile import profile_from_json
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json
from specsim.io.progress import Progress
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.registry import SWITCH_POLICIES
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.replaying.intervals import beyond_floor, paired_difference, ratio_interval
from specsim.replaying.prediction import Prediction, oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.trace.joined import JoinedTrace, join_traces
from specsim.trace.trace import Trace


def validate_joined(
    pairs: Sequence[Pair],
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    out: Path,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Tune switching policies and every drafter alone on one part of the prompts, predict and decode the other.

    Parameters
    ----------
    pairs : sequence of Pair
        Of the same target; their order is that of the drafters' numbers; see `realrun.pairs.joined.join_pairs`.
    prompts, settings, out, progress
        As of `realrun.experiment.run.validate`; a trace is kept for every drafter.

    Returns
    -------
    dict
        The document of validation.json: a row for each policy, and under "switching" the best switching policy against
        the best single drafter, both chosen on the tuning part, predicted and measured on the other with intervals.

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
    tuning, held = check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    work = out / UNFINISHED
    if settings.overwrite:
        remove_folder(work)
    sealed = settings.overwrite or not trace_folder(out, 1).exists()
    train = _recorded(pairs, prompts, settings, out, progress, tuning)
    identities = {f"drafter {n}": identity_of(pair, prompts, settings) for n, pair in enumerate(pairs, start=1)}
    claim(work / IDENTITY, identities, f"{work} holds an unfinished validation", OTHER)
    tuning_profiles = [
        tuning_profile(pair, prompts, settings, work / f"tuning_profile-{number}.json", progress)
        for number, pair in enumerate(pairs, start=1)
    ]
    cost = JoinedCost(tuple(profile_from_json(document, "just measured") for document in tuning_profiles))
    drawn = zip(*(drawn_costs(document, settings.seed) for document in tuning_profiles), strict=True)
    chosen, skipped = _candidates(PricedTrace(train, cost), settings, work, progress)
    error = max(map(run_error, tuning_profiles))
    facts = {"source": "measured just before"}
    before = ForecastCosts(cost, facts, error, drawn=[JoinedCost(costs) for costs in drawn])
    forecasts = sealed_forecast(
        work, forecast(chosen, train, before, held_out=len(held), sealed=sealed, seed=settings.seed)
    )
    holdout = _recorded(pairs, prompts, settings, out, progress).select(held)
    texts = [prompts[sequence] for sequence in held.tolist()]
    measurement, profiles = _decoded(pairs, joined, chosen, texts, train, holdout, settings, work, progress)
    costs = JoinedCost(tuple(profile_from_json(document, "just measured") for document in profiles))
    known = {"text_known": PricedTrace(holdout, cost), "costs_known": PricedTrace(train, costs)}
    document = {
        "kind": "specsim-joined-validation",
        "target": joined.target_name,
        "drafters": [pair.draft_name for pair in pairs],
        "decoding": settings.record.sampler.as_dict(),
        "environment": joined.environment,
        "sequences": forecasts["sequences"],
        "forecast": {key: value for key, value in forecasts.items() if key != "rows"},
        "output_tokens": int(holdout.output_tokens.sum()),
        **_compared(chosen, PricedTrace(holdout, costs), known, forecasts, measurement, settings.seed),
        "skipped": [{"policy": name, "reason": reason} for name, reason in skipped],
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "load": measurement.load._asdict(),
        "options": settings.options,
    }
    write_json(joined_document(profiles), out / "cost.json")
    write_json(document, out / "validation.json")
    keep_forecast(work, out)
    remove_folder(work)
    return document


def trace_folder(out: Path, number: int) -> Path:
    """Name the folder of a drafter's trace. number : of the drafter, from 1"""
    return out / f"trace-{number}"


def _recorded(
    pairs: Sequence[Pair],
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    out: Path,
    progress: Progress,
    sequences: Ints | None = None,
) -> JoinedTrace:
    """Record these sequences of every drafter, or read them, and join the traces. sequences : by default all"""
    traces = {}
    for number, pair in enumerate(pairs, start=1):
        folder = trace_folder(out, number)
        traces[str(folder)] = recorded_trace(
            pair,
            prompts,
            settings.record,
            folder,
            lambda done, total: progress("record" if sequences is None else "record tuning prompts", done, total),
            overwrite=settings.overwrite,
            sequences=sequences,
        )
    return join_traces(traces)


def _decoded(
    pairs: Sequence[Pair],
    joined: Pair,
    chosen: Sequence[Candidate],
    texts: Sequence[Prompt],
    train: Trace,
    holdout: Trace,
    settings: ValidationSettings,
    work: Path,
    progress: Progress,
) -> tuple[Measurement, list[dict[str, Any]]]:
    """Decode the held-out prompts with all policies; the measurement, and every drafter's profile from its rounds."""
    costs = [
        MeasuredCosts(
            pair,
            holdout,
            tree_tokens=0,
            sampler=settings.record.sampler,
            seed=settings.seed,
            texts=settings.repeats * len(texts),
            beside=train,
        )
        for pair in pairs
    ]
    arms = arms_of(joined, chosen, settings)
    baselines = [0, len(arms) - 1]  # whose rounds are any drafter's
    measurement = measure_in_turns(
        arms,
        {f"drafter {number}": Costs(cost, baselines) for number, cost in enumerate(costs, start=1)},
        texts,
        holdout,
        work / DECODED,
        repeats=settings.repeats,
        seed=settings.seed,
        progress=lambda done, total: progress("decode", done, total),
    )
    profiles = [
        cost.document(_runs_of(number, measurement), settings.repeats) for number, cost in enumerate(costs, start=1)
    ]
    return measurement, profiles


def _candidates(
    train: PricedTrace, settings: ValidationSettings, work: Path, progress: Progress
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Tune every drafter alone, then every switching policy; with them (policy, reason) of those left out."""
    trace = train.trace
    assert isinstance(trace, JoinedTrace)
    search = SearchSettings(trials=settings.trials, seed=settings.seed)
    alone = [
        best_policy(OneDrafter, train, replace(search, fixed={"drafter": number}))
        for number in range(1, len(trace.parts) + 1)
    ]
    switching, skipped = candidates(
        trace,
        train.cost,
        search,
        kinds=[kind for kind in settings.kinds or () if kind is not OneDrafter],
        progress=progress,
        kept=work / TUNED,
    )
    single = [Candidate(policy, "alone", train.replay(policy, seed=settings.seed).speedup) for policy in alone]
    return [*single, *switching], skipped


def _runs_of(drafter: int, measurement: Measurement) -> Iterator[Run]:
    """Yield the baselines' rounds, and of every other arm those that this drafter drafted."""
    for policy, prompt_tokens, rounds in measurement.runs(range(len(measurement.arms))):
        own = rounds if policy is None else [round_ for round_ in rounds if round_.drafter == drafter]
        yield policy, prompt_tokens, own


def _compared(
    chosen: Sequence[Candidate],
    priced: PricedTrace,
    known: Mapping[str, PricedTrace],
    forecast_document: Mapping[str, Any],
    measurement: Measurement,
    seed: int,
) -> dict[str, Any]:
    """Rows, fastest first, the noise floor, and the best switching policy against the best single drafter.

    known : what else every policy is replayed on, by the key of its speedup in a row
    """
    trace = priced.trace
    assert isinstance(trace, JoinedTrace)
    oracle_s = oracle_seconds(priced, [OneDrafter])
    replays = [priced.replay(candidate.policy, seed=seed, log=True) for candidate in chosen]
    rows = [
        {
            **_row(measurement, arm, candidate, summarise(replayed, oracle_s), replayed, trace),
            "forecast": promised["forecast"],
            **speedups_on(known, candidate.policy, seed),
        }
        for arm, (candidate, replayed, promised) in enumerate(
            zip(chosen, replays, forecast_document["rows"], strict=True), start=1
        )
    ]
    baseline_s, *arms_s, _ = measurement.seconds
    forecasts = [
        Forecast(str(candidate.policy), candidate.train_speedup or 0.0, own_s)
        for candidate, own_s in zip(chosen, arms_s, strict=True)
    ]
    floor = measurement.noise_floor_percent
    return {
        "null_arm": measurement.null_arm.as_dict(),
        "noise_floor_percent": floor,
        "baseline": rate_of(baseline_s, measurement.baseline_tokens),
        "rows": sorted(rows, key=lambda row: -row["measured"]["estimate"]),
        "median_abs_error_percent": float(np.median([abs(row["error_percent"]) for row in rows])),
        "errors": errors_of(rows),
        "choice": choice_of(forecasts, baseline_s, floor),
        "switching": _switching(chosen, replays, rows, measurement),
    }


def _row(
    measurement: Measurement,
    arm: int,
    candidate: Candidate,
    predicted: Prediction,
    replayed: Replay,
    trace: JoinedTrace,
) -> dict[str, Any]:
    """A policy's row of the document."""
    policy, runs = candidate.policy, measurement.last_runs(arm)
    drafters = [round_.drafter for run in runs for round_ in run.rounds if round_.drafter]
    measured = ratio_interval(measurement.seconds[0], measurement.seconds[arm])
    return {
        "policy": policy.name,
        "label": str(policy),
        "params": policy.settings,
        "role": candidate.role,
        "predicted": predicted.speedup.as_dict(),
        "train_speedup": candidate.train_speedup,
        **compared(measurement, arm, measured, predicted.speedup.estimate, replayed, trace),
        "oracle_regret": predicted.oracle_regret,
        "tau": predicted.tau,
        "rounds_of_drafters": np.bincount(drafters, minlength=len(trace.parts) + 1)[1:].tolist(),
    }


def _switching(
    chosen: Sequence[Candidate],
    replays: Sequence[Replay],
    rows: Sequence[Mapping[str, Any]],
    measurement: Measurement,
) -> dict[str, Any]:
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
    speedups = [rows[number]["measured"]["estimate"] for number in (switch, single)]
    return {
        "best_single": rows[single]["label"],
        "best_switch": rows[switch]["label"],
        "predicted": predicted.as_dict(),
        "measured": measured.as_dict(),
        "resolved": bool(measured.significant and beyond_floor(measurement.noise_floor_percent, *speedups)),
    }
