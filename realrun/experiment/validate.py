"""A validation: tune every policy offline, predict, really decode, compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from realrun.decode.rounds import Decoded
from realrun.experiment.divergence import Divergence, divergences
from realrun.experiment.error_parts import error_parts
from realrun.experiment.measured_costs import MeasuredCosts
from realrun.experiment.measuring import Costs, Measurement, measure_in_turns
from realrun.experiment.settings import Candidate, ExperimentSettings, ValidationSettings
from realrun.experiment.timing import Arm, make_arm
from realrun.own_files import read_own
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.acceptance import formulas as metrics
from specsim.cost.model import CostModel
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.io.progress import Progress
from specsim.learn.fit import needs_fitting
from specsim.learn.settings import SearchSettings
from specsim.learn.variants import applicable_variants, fit_variant, label
from specsim.policy.base import Policy, Variant, build_policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.intervals import Estimate, beyond_floor, paired_difference, ratio_interval
from specsim.replaying.prediction import Ladder, Prediction, ladder, oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

TUNED, DECODED = "tuned.json", "decoded"  # in the folder of a validation that is not whole


class TunedFile(TypedDict):
    """A policy's settings and where they come from, or the reason why it cannot be validated."""

    params: NotRequired[dict[str, Any]]
    role: NotRequired[str]
    train_speedup: NotRequired[float]
    reason: NotRequired[str]


@dataclass(frozen=True)
class Row:
    """One policy: what was predicted and what was measured on the same sequences."""

    candidate: Candidate
    replayed: Replay
    predicted: Prediction
    unseen: float  # the speedup predicted from what the others' rounds cost, as if this policy had not been run
    measured: Estimate
    wall_clock: dict[str, Any]  # as `realrun.experiment.timing.wall_clock` gives it
    ladder: Ladder
    error_parts: dict[str, Any]  # as `realrun.experiment.error_parts` gives them
    speculative_s: Floats  # measured, per sequence
    runs: list[Decoded]  # the last run of every sequence
    measured_tau: float
    overhead: float  # mean seconds of a round over those of an autoregressive step, measured
    measured_v_d: float
    rounds_identical: float | None  # None where the replay draws its own acceptance
    output_identical: float | None
    divergences: list[Divergence]  # the first of every sequence that has one

    @property
    def acceleration_over_overhead(self) -> float:
        """Speedup by MEDUSA's relation: tokens per round, over what a round costs in autoregressive steps.

        It differs from `measured` in one thing alone: it does not correct for an output that is longer or shorter
        than the baseline's.

        Reference: Cai et al. 2024, arXiv:2401.10774, section 4.
        """
        return self.measured_tau / self.overhead

    @property
    def error_percent(self) -> float:
        return (self.predicted.speedup.estimate / self.measured.estimate - 1) * 100

    @property
    def unseen_error_percent(self) -> float:
        return (self.unseen / self.measured.estimate - 1) * 100


@dataclass(frozen=True)
class Validation:
    """All rows, with the held-out trace and the measurement behind them."""

    rows: list[Row]
    train: Trace
    holdout: Trace
    profile: dict[str, Any]  # the document of what rounds cost meanwhile, from the arms' own rounds and probes
    measurement: Measurement
    environment: dict[str, Any]
    seed: int
    skipped: list[tuple[str, str]]  # (policy, reason) of those that trace or costs cannot serve

    @property
    def median_abs_error_percent(self) -> float:
        return float(np.median([abs(row.error_percent) for row in self.rows]))

    @property
    def p90_abs_error_percent(self) -> float:
        return float(np.quantile([abs(row.error_percent) for row in self.rows], 0.9))

    def resolved(self, row: Row, best: Row) -> bool:
        """Whether two rows' measured speedups differ: by more than the noise floor, and significantly."""
        difference = paired_difference(self.measurement.seconds[0], best.speculative_s, row.speculative_s)
        speedups = row.measured.estimate, best.measured.estimate
        return difference.significant and beyond_floor(self.measurement.noise_floor_percent, *speedups)


def candidates(
    train: Trace,
    cost: CostModel,
    *,
    kinds: Sequence[type[Policy]] | None = None,
    trials: int,
    seed: int,
    progress: Progress | None = None,
    kept: Path | None = None,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Tune every policy that the trace can serve, in all its variants, on `train`.

    Returns the distinct policies, and (policy, reason) of those that trace or costs cannot serve.

    kept : file of tuned policies, written after each; policies in it are not tuned again
    """
    chosen: list[Candidate] = []
    priced = PricedTrace(train, cost)
    served, skipped = applicable_variants(train, POLICIES.values() if kinds is None else kinds, cost)
    tuned: dict[str, Any] = {}
    if kept is not None and kept.is_file():
        tuned = read_own(kept, dict[str, TunedFile], again="delete it to tune again")
    for done, (kind, variant) in enumerate(served):
        name = label(kind, variant)
        if name not in tuned:
            tuned[name] = _tuned(kind, variant, priced, SearchSettings(trials=trials, seed=seed))
            if kept is not None:
                write_json(tuned, kept)
        if reason := tuned[name].get("reason"):
            skipped.append((name, reason))
        else:
            policy = build_policy(kind, tuned[name]["params"])
            if all(policy != candidate.policy for candidate in chosen):
                chosen.append(Candidate(policy, tuned[name]["role"], tuned[name].get("train_speedup")))
        if progress:
            progress("tune", done + 1, len(served))
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        raise InputError(f"none of the policies can be validated here ({reasons}); choose others")
    return chosen, skipped


def _tuned(kind: type[Policy], variant: Variant, priced: PricedTrace, search: SearchSettings) -> dict[str, Any]:
    """Tune a policy: its settings and where they come from, or the reason why it cannot be validated."""
    try:
        policy = fit_variant(kind, variant, priced, search)
        check_replayable(priced.trace, policy)
        check_covered(priced.trace, policy, priced.table(policy))
        forecast = priced.replay(policy, seed=search.seed).speedup
    except InputError as error:  # such as a tree larger than those profiled
        return {"reason": str(error)}
    by_default = "fixed_k" if kind is FixedK else "fitted" if needs_fitting(kind) else "default"
    return {"params": policy.settings, "role": "tuned" if variant.tuned else by_default, "train_speedup": forecast}


def predict_and_measure(
    pair: Pair,
    trace: Trace,
    prompts: Sequence[Prompt],
    cost: ProfileCost,
    settings: ValidationSettings,
    progress: Progress = lambda what, done, total: None,
    folder: Path | None = None,
) -> Validation:
    """Tune on one part of the trace, then decode the held-out prompts for real.

    Every prompt is decoded at once by the baseline, by a repeated baseline that shows what differs by chance (the A/A
    test), and by every policy, in turns of a few rounds; probes of what no arm does often take turns too. Every round
    is taken at the median of its repeats. Policies are tuned under `cost`, and forecast by it; predictions use the
    costs of the rounds decoded here. prompts[i] must be the prompt of the trace's sequence i.

    folder : where tuned policies and decoded sequences are kept, and read if they exist; None keeps nothing
    """
    tuning, held = split_sequences(trace, tuning_share=settings.tuning_share, seed=settings.seed)
    train, holdout = trace.select(tuning), trace.select(held)
    if settings.tuned is None:
        chosen, skipped = candidates(
            train,
            cost,
            kinds=settings.kinds,
            trials=settings.trials,
            seed=settings.seed,
            progress=progress,
            kept=folder and folder / TUNED,
        )
    else:
        chosen, skipped = list(settings.tuned.candidates), []
    texts = [prompts[sequence] for sequence in held.tolist()]
    costs = MeasuredCosts(
        pair,
        holdout,
        tree_tokens=cost.max_tree_tokens,
        sampler=settings.record.sampler,
        seed=settings.seed,
        texts=settings.repeats * len(texts),
    )
    arms = arms_of(pair, chosen, settings)
    measurement = measure_in_turns(
        arms,
        {"pair": Costs(costs, range(len(arms)))},
        texts,
        holdout,
        folder and folder / DECODED,
        repeats=settings.repeats,
        seed=settings.seed,
        progress=lambda done, total: progress("decode", done, total),
    )

    def profile_of(arms: Iterable[int]) -> dict[str, Any]:
        return costs.document(measurement.runs(arms), settings.repeats)

    document = profile_of(range(len(arms)))
    priced = PricedTrace(holdout, profile_from_json(document, "just measured"))
    oracle_s = oracle_seconds(priced, [type(candidate.policy) for candidate in chosen], seed=settings.seed)
    rows = []
    for arm, candidate in enumerate(chosen, start=1):
        others = profile_of(other for other in range(len(arms)) if other != arm)
        unseen = PricedTrace(holdout, profile_from_json(others, "just measured"))
        rows.append(_row(measurement, arm, candidate, priced, unseen, oracle_s, settings.seed))
    return Validation(
        rows=rows,
        train=train,
        holdout=holdout,
        profile=document,
        measurement=measurement,
        environment=pair.environment,
        seed=settings.seed,
        skipped=skipped,
    )


def arms_of(pair: Pair, chosen: Sequence[Candidate], settings: ExperimentSettings) -> list[Arm]:
    """Make the arms of a measurement: the baseline, these policies, and the baseline once more."""
    policies: list[Policy | None] = [None, *(candidate.policy for candidate in chosen), None]
    return [make_arm(str(policy), policy, pair, settings.record.sampler) for policy in policies]


def _row(
    measurement: Measurement,
    arm: int,
    candidate: Candidate,
    priced: PricedTrace,
    unseen: PricedTrace,
    oracle_s: Floats,
    seed: int,
) -> Row:
    """Compare an arm's runs with its replay. unseen : the trace at costs from the other arms' rounds alone"""
    trace, cost, policy = priced.trace, priced.cost, candidate.policy
    assert isinstance(cost, ProfileCost)
    replayed = priced.replay(policy, seed=seed, log=True)
    runs, timings = measurement.last_runs(arm), measurement.timings
    all_runs = [run for index in measurement.sequences for run in timings.runs[arm, index]]
    rounds = [round_ for run in all_runs for round_ in run.rounds]
    accepted, drafted = (sum(getattr(round_, name) for round_ in rounds) for name in ("accepted", "drafted"))
    round_s, baseline_round_s = (timings.mean_round_s(number, measurement.sequences) for number in (arm, 0))
    measured = ratio_interval(measurement.seconds[0], measurement.seconds[arm])
    exact = not trace.approximate
    same_rounds = rounds_identical(replayed, runs) if exact else None
    same_output = output_identical(trace, runs) if exact else None
    departures: list[Divergence] = []
    if exact and not same_rounds == same_output == 1:
        assert replayed.rounds is not None
        decoder = measurement.arms[arm].decoder
        departures = divergences(decoder, policy, trace, measurement.prompts, replayed.rounds, runs, seed=seed)
    return Row(
        candidate=candidate,
        replayed=replayed,
        predicted=summarise(replayed, oracle_s),
        unseen=unseen.replay(policy, seed=seed).speedup,
        measured=measured,
        wall_clock=measurement.wall_clock(arm, measured),
        ladder=ladder(trace, policy, cost, seed=seed),
        error_parts=error_parts(priced, replayed, measurement.typical_rounds(arm)),
        speculative_s=measurement.seconds[arm],
        runs=runs,
        measured_tau=sum(len(run.tokens) for run in all_runs) / len(rounds),
        overhead=round_s / baseline_round_s,
        measured_v_d=float(metrics.draft_precision(accepted, drafted)),
        rounds_identical=same_rounds,
        output_identical=same_output,
        divergences=departures,
    )


def compared(
    measurement: Measurement, arm: int, measured: Estimate, predicted: float, replayed: Replay, trace: Trace
) -> dict[str, Any]:
    """Compare an arm of an exact trace with its replay, as JSON. predicted : its speedup by replay"""
    runs = measurement.last_runs(arm)
    return {
        "measured": measured.as_dict(),
        **measurement.wall_clock(arm, measured),
        "error_percent": (predicted / measured.estimate - 1) * 100,
        "rounds_identical_percent": 100 * rounds_identical(replayed, runs),
        "output_identical_percent": 100 * output_identical(trace, runs),
    }


def rounds_identical(replayed: Replay, runs: Sequence[Decoded]) -> float:
    """Compute the share of replayed rounds that the real run has too, by t, tokens, last token and drafter."""
    assert replayed.rounds is not None
    real = {(index, *row) for index, run in enumerate(runs) for row in run.full_log()}
    log = replayed.rounds
    wanted = [(*row, drafter) for row, drafter in zip(log.rows(), log.drafter.tolist(), strict=True)]
    return len(real.intersection(wanted)) / len(log)


def output_identical(trace: Trace, runs: Sequence[Decoded]) -> float:
    """Compute the share of sequences whose real output equals the recorded output, token for token."""
    same = 0
    for index, run in enumerate(runs):
        recorded = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        same += recorded == run.tokens
    return same / len(runs)
