"""`realrun validate --join`: several drafters over a target, each alone and under policies that switch.

Every drafter is recorded and profiled alone, as ever; their traces are joined, and each switching policy, and each
drafter alone, is tuned on the tuning prompts. On the held-out prompts all of them really decode, in turns of a few
rounds over the target, and what rounds cost meanwhile prices the prediction, each round by the drafter that drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from realrun.experiment.document import Forecast, choice_of, errors_of, rate_of
from realrun.experiment.forecast import ForecastCosts, drawn_costs, run_error, speedups_on, tuning_profile
from realrun.experiment.measuring import Measurement
from realrun.experiment.pipeline import IDENTITY, OTHER, UNFINISHED, Contender, Outcome, Validation, identity_of
from realrun.experiment.settings import Candidate, ValidationSettings
from realrun.experiment.validate import compared
from realrun.kept_files import claim
from realrun.pairs.joined import join_pairs
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.cost.joined import JoinedCost, joined_document
from specsim.cost.model import CostModel
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.progress import Progress
from specsim.learn.search import best_policy
from specsim.policy.base import Policy
from specsim.policy.registry import SWITCH_POLICIES
from specsim.policy.switch.one_drafter import OneDrafter
from specsim.replaying.intervals import beyond_floor, paired_difference, ratio_interval
from specsim.replaying.prediction import Prediction, oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace

JOINED = "joined"  # the only contender


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
    folders = {trace_folder(out, number): pair for number, pair in enumerate(pairs, start=1)}
    contenders = {JOINED: Contender(joined, folders, settings.record)}
    work = out / UNFINISHED
    experiment = _JoinedValidation(contenders, joined, prompts, settings, work, progress, overwrite=settings.overwrite)
    experiment.begin(out)
    outcome = experiment.run()
    holdout, measurement = outcome.holdouts[JOINED], outcome.measurement
    assert measurement is not None
    document = {
        "kind": "specsim-joined-validation",
        "target": joined.target_name,
        "drafters": [pair.draft_name for pair in pairs],
        "decoding": settings.record.sampler.as_dict(),
        "environment": joined.environment,
        "sequences": outcome.forecast["sequences"],
        "forecast": {key: value for key, value in outcome.forecast.items() if key != "rows"},
        "output_tokens": int(holdout.output_tokens.sum()),
        **_compared(outcome, measurement, settings.seed),
        "skipped": [{"policy": policy, "reason": reason} for _, policy, reason in outcome.skipped],
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "load": measurement.load._asdict(),
        "options": settings.options,
    }
    write_json(joined_document(outcome.profiles[JOINED]), out / "cost.json")
    write_json(document, out / "validation.json")
    experiment.finish(out)
    return document


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
        drawn = zip(*(drawn_costs(profile, self.settings.seed) for profile in profiles), strict=True)
        return {
            JOINED: ForecastCosts(
                self.contenders[JOINED].cost(profiles),
                {"source": "measured just before"},
                max(map(run_error, profiles)),
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


def _compared(outcome: Outcome, measurement: Measurement, seed: int) -> dict[str, Any]:
    """Rows, fastest first, the noise floor, and the best switching policy against the best single drafter."""
    train, trace, costs = outcome.trains[JOINED], outcome.holdouts[JOINED], outcome.run_cost(JOINED)
    assert isinstance(trace, JoinedTrace)
    priced = PricedTrace(trace, costs)
    known = {
        "text_known": PricedTrace(trace, outcome.costs[JOINED].cost),
        "costs_known": PricedTrace(train, costs),
    }
    oracle_s = oracle_seconds(priced, [OneDrafter])
    chosen = [entry.candidate for entry in outcome.entries]
    replays = [priced.replay(candidate.policy, seed=seed, log=True) for candidate in chosen]
    rows = [
        {
            **_row(measurement, arm, entry.candidate, summarise(replayed, oracle_s), replayed, trace),
            "forecast": entry.forecast["forecast"],
            **speedups_on(known, entry.candidate.policy, seed),
        }
        for arm, (entry, replayed) in enumerate(zip(outcome.entries, replays, strict=True), start=1)
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
