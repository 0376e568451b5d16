"""A validation: tune every policy offline, then decode for real, and compare the forecasts with that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from realrun.decode.rounds import Decoded, Round
from realrun.experiment.divergence import divergences, summary
from realrun.experiment.forecast import speedups_on
from realrun.experiment.forecast_costs import ForecastCosts
from realrun.experiment.measured_costs import MeasuredCosts
from realrun.experiment.measuring import Costs, Measurement, measure_in_turns
from realrun.experiment.settings import Candidate, ExperimentSettings, ValidationSettings
from realrun.experiment.timing import Arm, make_arm
from realrun.kept_files import read_own
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.acceptance import formulas as metrics
from specsim.cost.model import CostModel
from specsim.cost.profile import profile_from_json
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
    forecasts : "forecast", the speedup forecast with low and high; "text_known", the speedup by replay of the held-out
        text at the costs of the forecast; "costs_known", by replay of the tuning text at the costs of this run; the
        first two also "_without_probe", None unless a probe rescaled the costs. Empty without a forecast
    predicted : by replay of the held-out text at the costs of this run, which decomposes the measurement
    speculative_s : measured seconds per sequence
    rounds : of every sequence, each at the median of its repeats
    runs : the last run of every sequence
    text : facts that take an output to compare, which a scripted run does not have
    """

    candidate: Candidate
    priced: PricedTrace
    replayed: Replay
    predicted: Prediction
    measured: Estimate
    wall_clock: dict[str, Any]  # as `realrun.experiment.timing.wall_clock` gives it
    speculative_s: Floats
    rounds: Sequence[Sequence[Round]]
    runs: list[Decoded]
    rounds_identical: float | None  # None where the replay draws its own acceptance
    text: Mapping[str, Any] = field(default_factory=dict)
    forecasts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error_percent(self) -> float:
        return (self.predicted.speedup.estimate / self.measured.estimate - 1) * 100


@dataclass(frozen=True)
class Validation:
    """All rows, with the forecast before and the measurement behind them.

    forecast : the document of forecast.json
    """

    rows: list[Row]
    forecast: Mapping[str, Any]
    holdout: Trace
    profile: dict[str, Any]  # the document of what rounds cost meanwhile, from the arms' own rounds and probes
    measurement: Measurement
    environment: dict[str, Any]
    seed: int

    def resolved(self, row: Row, best: Row) -> bool:
        """Whether two rows' measured speedups differ: by more than the noise floor, and significantly."""
        difference = paired_difference(self.measurement.seconds[0], best.speculative_s, row.speculative_s)
        speedups = row.measured.estimate, best.measured.estimate
        return difference.significant and beyond_floor(self.measurement.noise_floor_percent, *speedups)


def candidates(
    train: Trace,
    cost: CostModel,
    search: SearchSettings,
    *,
    kinds: Sequence[type[Policy]] | None = None,
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
            tuned[name] = _tuned(kind, variant, priced, search)
            if kept is not None:
                write_json(tuned, kept)
        if reason := tuned[name].get("reason"):
            skipped.append((name, reason))
        else:
            policy = build_policy(kind, tuned[name]["params"])
            if all(policy != candidate.policy for candidate in chosen):
                chosen.append(Candidate(policy, tuned[name]["role"], tuned[name].get("train_speedup"), name))
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


def measure(
    pair: Pair,
    train: Trace,
    holdout: Trace,
    prompts: Sequence[Prompt],
    chosen: Sequence[Candidate],
    costs: ForecastCosts,
    forecasts: Mapping[str, Any],
    settings: ValidationSettings,
    progress: Progress = lambda what, done, total: None,
    folder: Path | None = None,
) -> Validation:
    """Decode the held-out prompts for real, and compare the forecasts with what that measures.

    Every prompt is decoded at once by the baseline, by a repeated baseline that shows what differs by chance (the A/A
    test), and by every policy, in turns of a few rounds; probes of what no arm does often take turns too. Every round
    is taken at the median of its repeats.

    train, holdout : traces of the tuning and of the held-out prompts
    prompts : the held-out prompts
    costs, forecasts : costs from before, and the document of the forecasts made under them
    folder : where decoded sequences are kept, and read if they exist; None keeps nothing
    """
    measured = MeasuredCosts(
        pair,
        holdout,
        tree_tokens=costs.cost.max_tree_tokens if settings.record.tree_nodes else 0,
        sampler=settings.record.sampler,
        seed=settings.seed,
        texts=settings.repeats * len(prompts),
        beside=train,
    )
    arms = arms_of(pair, chosen, settings)
    measurement = measure_in_turns(
        arms,
        {"pair": Costs(measured, range(len(arms)))},
        prompts,
        holdout,
        folder and folder / DECODED,
        repeats=settings.repeats,
        seed=settings.seed,
        progress=lambda done, total: progress("decode", done, total),
    )
    document = measured.document(measurement.runs(range(len(arms))), settings.repeats)
    just_measured = profile_from_json(document, "just measured")
    priced = PricedTrace(holdout, just_measured)
    known = {"text_known": PricedTrace(holdout, costs.cost), "costs_known": PricedTrace(train, just_measured)}
    if costs.unprobed is not None:
        known["text_known_without_probe"] = PricedTrace(holdout, costs.unprobed)
    oracle_s = oracle_seconds(priced, [type(candidate.policy) for candidate in chosen], seed=settings.seed)
    rows = [
        replace(
            _row(measurement, arm, candidate, priced, oracle_s, settings.seed),
            forecasts={
                **dict.fromkeys(("forecast_without_probe", "text_known_without_probe")),
                **{key: value for key, value in forecast.items() if key.startswith("forecast")},
                **speedups_on(known, candidate.policy, settings.seed),
            },
        )
        for arm, (candidate, forecast) in enumerate(zip(chosen, forecasts["rows"], strict=True), start=1)
    ]
    return Validation(
        rows=rows,
        forecast=forecasts,
        holdout=holdout,
        profile=document,
        measurement=measurement,
        environment=pair.environment,
        seed=settings.seed,
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
    oracle_s: Floats,
    seed: int,
) -> Row:
    """Compare an arm's runs with its replay at the costs of this run."""
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
