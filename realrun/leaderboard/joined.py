"""`realrun validate --join`: several drafters over one target, one by one and under policies that switch.

Every drafter is recorded and profiled alone, as ever; their traces are joined, and each switching policy, and each
drafter alone, is tuned on one part of the prompts. On the other part all of them really decode, in turns of a few
rounds over one target, and what rounds cost meanwhile prices the prediction, each round by the drafter that drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from realrun.experiment.choice import Forecast, choice_of
from realrun.experiment.document import rate_of
from realrun.experiment.measured_costs import MeasuredCosts, Run
from realrun.experiment.measuring import Costs, measure_in_turns
from realrun.experiment.run import (
    ANEW,
    TUNING_REPEATS,
    UNFINISHED,
    ValidationSettings,
    claim,
    identity_of,
    keep_forecast,
)
from realrun.experiment.timing import Arm, Timings, make_arm, wall_clock
from realrun.experiment.validate import TUNED, Candidate, candidates, output_identical, rounds_identical
from realrun.measure.profile import profile
from realrun.measure.reuse import check_job, recorded_trace
from realrun.own_files import read_own
from realrun.pairs.joined import join_pairs
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.cost.contexts import context_range
from specsim.cost.joined import JoinedCost, joined_document
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json
from specsim.io.progress import Progress
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.registry import SWITCH_POLICIES
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.replaying.intervals import beyond_floor, noise_floor_percent, paired_difference, ratio_interval
from specsim.replaying.prediction import oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import JoinedTrace, join_traces
from specsim.trace.split import split_sequences


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
        Of one target, in the order in which drafters count; see `realrun.pairs.joined.join_pairs`.
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
    pair = join_pairs(pairs)
    if settings.record.tree_nodes:
        raise InputError("switching policies draft chains; validate several drafters with --tree-nodes 0")
    if settings.record.sampler.mode == "rejection":
        raise InputError(
            "under rejection sampling the output depends on the drafter, so that several cannot be joined; choose "
            "--mode greedy or gumbel"
        )
    settings = replace(settings, kinds=tuple(settings.kinds or SWITCH_POLICIES.values()))
    check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    work = out / UNFINISHED
    if settings.overwrite:
        remove_folder(work)
    folders = [out / f"trace-{number}" for number in range(1, len(pairs) + 1)]
    traces = {}
    for one, folder in zip(pairs, folders, strict=True):
        traces[str(folder)] = recorded_trace(
            one,
            prompts,
            settings.record,
            folder,
            lambda done, total: progress("record", done, total),
            overwrite=settings.overwrite,
        )
    trace = join_traces(traces)
    identities = [identity_of(one, folder, settings) for one, folder in zip(pairs, folders, strict=True)]
    claim(work, {f"drafter {number}": one for number, one in enumerate(identities, start=1)})
    tuning, held = split_sequences(trace, tuning_share=settings.tuning_share, seed=settings.seed)
    train = PricedTrace(trace.select(tuning), _tuning_costs(pairs, trace, settings, work, progress))
    holdout = trace.select(held)
    chosen, skipped = _candidates(train, settings, work, progress)
    texts = [prompts[sequence] for sequence in held.tolist()]
    measured = [
        MeasuredCosts(
            one, holdout, tree_tokens=0, sampler=settings.record.sampler, seed=settings.seed,
            texts=settings.repeats * len(texts),
        )
        for one in pairs
    ]  # fmt: skip
    policies: list[Policy | None] = [None, *(candidate.policy for candidate in chosen), None]
    arms = [make_arm(str(policy), policy, pair, settings.record.sampler) for policy in policies]
    baselines = [0, len(arms) - 1]  # whose rounds are any drafter's
    timings, load = measure_in_turns(
        arms,
        {f"drafter {number}": Costs(one, baselines) for number, one in enumerate(measured, start=1)},
        texts,
        holdout,
        work / "decoded",
        repeats=settings.repeats,
        seed=settings.seed,
        progress=lambda done, total: progress("decode", done, total),
    )
    documents = [
        one.document(_runs_of(number, arms, timings, texts), settings.repeats)
        for number, one in enumerate(measured, start=1)
    ]
    priced = PricedTrace(holdout, JoinedCost(tuple(profile_from_json(one, "just measured") for one in documents)))
    result = _compared(chosen, priced, timings, settings.seed)
    document = {
        "kind": "specsim-joined-validation",
        "target": pair.target_name,
        "drafters": [one.draft_name for one in pairs],
        "decoding": settings.record.sampler.as_dict(),
        "environment": pair.environment,
        "sequences": {"tuning": train.trace.sequences, "holdout": holdout.sequences},
        "output_tokens": int(holdout.output_tokens.sum()),
        **result,
        "skipped": [{"policy": name, "reason": reason} for name, reason in skipped],
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "load": load._asdict(),
        "options": {name: getattr(settings, name) for name in ("trials", "repeats", "tuning_share", "seed")},
    }
    write_json(joined_document(documents), out / "cost.json")
    write_json(document, out / "validation.json")
    keep_forecast(work, out)
    remove_folder(work)
    return document


def _tuning_costs(
    pairs: Sequence[Pair], trace: JoinedTrace, settings: ValidationSettings, work: Path, progress: Progress
) -> JoinedCost:
    """What each drafter costs before any is decoded with; profiles that are there are read."""
    parts = []
    for number, pair in enumerate(pairs, start=1):
        path = work / f"tuning_profile-{number}.json"
        if not path.is_file():
            document = profile(
                pair,
                contexts=[*dict.fromkeys(context_range(trace))],
                depth=trace.depth,
                repeats=TUNING_REPEATS,
                sampler=settings.record.sampler,
                seed=settings.seed,
                tree_tokens=0,
                progress=lambda done, total: progress("profile", done, total),
            )
            write_json(document, path)
        parts.append(profile_from_json(read_own(path, again=ANEW), "just measured"))
    return JoinedCost(tuple(parts))


def _candidates(
    train: PricedTrace, settings: ValidationSettings, work: Path, progress: Progress
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Every drafter alone, then every switching policy, tuned; and (policy, reason) of those left out."""
    trace = train.trace
    assert isinstance(trace, JoinedTrace)
    search = SearchSettings(trials=settings.trials, seed=settings.seed)
    alone = [
        best_policy(OneDrafter, train, replace(search, fixed={"drafter": number}))
        for number in range(1, len(trace.parts) + 1)
    ]
    kinds = [kind for kind in settings.kinds or () if kind is not OneDrafter]
    switching, skipped = candidates(
        trace,
        train.cost,
        kinds=kinds,
        trials=settings.trials,
        seed=settings.seed,
        progress=progress,
        kept=work / TUNED,
    )
    single = [Candidate(policy, "alone", train.replay(policy, seed=settings.seed).speedup) for policy in alone]
    return [*single, *switching], skipped


def _runs_of(drafter: int, arms: Sequence[Arm], timings: Timings, texts: Sequence[Prompt]) -> Iterator[Run]:
    """The baselines' rounds, and of every other arm those that this drafter drafted."""
    for number, arm in enumerate(arms):
        for index, text in enumerate(texts):
            rounds = timings.rounds(number, index)
            kept = rounds if arm.policy is None else [one for one in rounds if one.drafter == drafter]
            yield arm.policy, len(text.tokens), kept


def _compared(chosen: Sequence[Candidate], priced: PricedTrace, timings: Timings, seed: int) -> dict[str, Any]:
    """Rows, fastest first, the noise floor, and the best switching policy against the best single drafter."""
    trace, everything = priced.trace, range(priced.trace.sequences)
    assert isinstance(trace, JoinedTrace)
    oracle_s = oracle_seconds(priced, [OneDrafter], seed=seed)
    baseline_s, *arms_s, null_s = (timings.seconds_for_baseline(arm, everything) for arm in range(len(chosen) + 2))
    null_arm = ratio_interval(baseline_s, null_s)
    floor = noise_floor_percent(null_arm)
    wall_s = [timings.wall_s_for_baseline(arm, everything) for arm in range(len(chosen) + 1)]
    rows: list[dict[str, Any]] = []
    found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}  # whether one drafter alone: speedup, arm
    replays = []
    for number, candidate in enumerate(chosen, start=1):
        policy, runs = candidate.policy, timings.last_runs(number, everything)
        replayed = priced.replay(policy, seed=seed, log=True)
        predicted, measured = summarise(replayed, oracle_s), ratio_interval(baseline_s, arms_s[number - 1])
        replays.append(replayed)
        found[candidate.role == "alone"].append((candidate.train_speedup or 0.0, number - 1))
        drafted = [one.drafter for run in runs for one in run.rounds if one.drafter]
        rows.append(
            {
                "policy": policy.name,
                "label": str(policy),
                "params": policy.settings,
                "role": candidate.role,
                "predicted": predicted.speedup.as_dict(),
                "measured": measured.as_dict(),
                **wall_clock(wall_s[0], wall_s[number], measured, floor),
                "train_speedup": candidate.train_speedup,
                "error_percent": (predicted.speedup.estimate / measured.estimate - 1) * 100,
                "rounds_identical_percent": 100 * rounds_identical(replayed, runs),
                "output_identical_percent": 100 * output_identical(trace, runs),
                "oracle_regret": predicted.oracle_regret,
                "tau": predicted.tau,
                "rounds_of_drafters": np.bincount(drafted, minlength=len(trace.parts) + 1)[1:].tolist(),
            }
        )
    forecasts = [
        Forecast(str(one.policy), one.train_speedup or 0.0, own_s) for one, own_s in zip(chosen, arms_s, strict=True)
    ]
    single, switch = (max(found[alone])[1] for alone in (True, False))
    speedups = [rows[number]["measured"]["estimate"] for number in (switch, single)]
    measured_gain = paired_difference(baseline_s, arms_s[switch], arms_s[single])
    predicted_gain = paired_difference(
        replays[switch].autoregressive_s, replays[switch].speculative_s, replays[single].speculative_s
    )
    switching: Mapping[str, Any] = {
        "best_single": rows[single]["label"],
        "best_switch": rows[switch]["label"],
        "predicted": predicted_gain.as_dict(),
        "measured": measured_gain.as_dict(),
        "resolved": bool(measured_gain.significant and beyond_floor(floor, *speedups)),
    }
    return {
        "null_arm": null_arm.as_dict(),
        "noise_floor_percent": floor,
        "baseline": rate_of(baseline_s, sum(len(run.tokens) for run in timings.last_runs(0, everything))),
        "rows": sorted(rows, key=lambda row: -row["measured"]["estimate"]),
        "median_abs_error_percent": float(np.median([abs(row["error_percent"]) for row in rows])),
        "choice": choice_of(forecasts, baseline_s, floor),
        "switching": switching,
    }
