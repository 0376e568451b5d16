"""A validation: tune every policy offline, predict, really decode, compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.experiment.divergence import divergences, summary
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
from specsim.replaying.prediction import Prediction, oracle_seconds, summarise
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
    """A policy's prediction and measurement on the same sequences.

    Parameters
    ----------
    unseen : speedup predicted from the costs of other policies' rounds, as if this policy had not been run
    speculative_s : measured seconds per sequence
    rounds : of every sequence, each at the median of its repeats
    runs : the last run of every sequence
    text : facts that take an output to compare, which a scripted run does not have
    """

    candidate: Candidate
    priced: PricedTrace
    replayed: Replay
    predicted: Prediction
    unseen: float
    measured: Estimate
    wall_clock: dict[str, Any]  # as `realrun.experiment.timing.wall_clock` gives it
    speculative_s: Floats
    rounds: Sequence[Sequence[Round]]
    runs: list[Decoded]
    rounds_identical: float | None  # None where the replay draws its own acceptance
    text: Mapping[str, Any] = field(default_factory=dict)

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
    replayed = priced.replay(candidate.policy, seed=seed, log=True)
    runs, exact = measurement.last_runs(arm), not priced.trace.approximate
    measured = ratio_interval(measurement.seconds[0], measurement.seconds[arm])
    same_rounds = rounds_identical(replayed, runs) if exact else None
    same_output = output_identical(priced.trace, runs) if exact else None
    text: dict[str, Any] = {
        "output_identical_percent": None if same_output is None else 100 * same_output,
        "sequence_tokens": [len(run.tokens) for run in runs],
        **_rates(measurement, arm, measured.estimate),
    }
    if exact and not same_rounds == same_output == 1:
        assert replayed.rounds is not None
        decoder, prompts, log = measurement.arms[arm].decoder, measurement.prompts, replayed.rounds
        if departures := divergences(decoder, candidate.policy, priced.trace, prompts, log, runs, seed=seed):
            text["divergences"] = summary(departures)
    return Row(
        candidate=candidate,
        priced=priced,
        replayed=replayed,
        predicted=summarise(replayed, oracle_s),
        unseen=unseen.replay(candidate.policy, seed=seed).speedup,
        measured=measured,
        wall_clock=measurement.wall_clock(arm, measured),
        speculative_s=measurement.seconds[arm],
        rounds=measurement.typical_rounds(arm),
        runs=runs,
        rounds_identical=same_rounds,
        text=text,
    )


def _rates(measurement: Measurement, arm: int, speedup: float) -> dict[str, float]:
    """Compute mean acceptance length, overhead and draft acceptance rate of all repeats.

    The overhead is the mean time of a round in autoregressive steps. MEDUSA's relation (Cai et al. 2024,
    arXiv:2401.10774, section 4) takes acceptance length over overhead for the speedup, which does not correct for an
    output that is longer or shorter than the baseline's.
    """
    timings, sequences = measurement.timings, measurement.sequences
    runs = [run for index in sequences for run in timings.runs[arm, index]]
    rounds = [round_ for run in runs for round_ in run.rounds]
    accepted, drafted = (sum(getattr(round_, name) for round_ in rounds) for name in ("accepted", "drafted"))
    tau = sum(len(run.tokens) for run in runs) / len(rounds)
    overhead = timings.mean_round_s(arm, sequences) / timings.mean_round_s(0, sequences)
    return {
        "measured_tau": tau,
        "overhead": overhead,
        "acceleration_over_overhead": tau / overhead,
        "acceleration_over_overhead_off_percent": (tau / overhead / speedup - 1) * 100,
        "measured_v_d": float(metrics.draft_precision(accepted, drafted)),
    }


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
