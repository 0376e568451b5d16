"""A validation: tune every policy offline, then decode for real, and compare the forecasts with that.

Recording and decoding compute the same logits in passes of other sizes, which round differently. In low precision two
tokens may then change places whose logits lie within a few steps of the number type, and a policy's signal may cross
its threshold. Anything larger is no rounding but a defect. The first round where a sequence departs from its replay is
therefore examined: decoding goes the same way again up to that round, whose logits are then read.

In its document there are, beside the rows, the errors of predicted times by part of a round, and the choice that the
forecast made before anything was decoded, with what it cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from msgspec.structs import replace

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler, gumbel_noise
from realrun.experiment.forecast import speedups_on
from realrun.experiment.measuring import Measurement
from realrun.experiment.pipeline import Entry, Outcome
from realrun.experiment.settings import Candidate
from realrun.experiment.timing import WallClock
from realrun.lm.cached import CachedLM
from realrun.pairs.prompts import Prompt
from specsim.acceptance import formulas as metrics
from specsim.io.arrays import Floats, finite_or_null
from specsim.learn.calibration import verified_tokens
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.registry import make_policy
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.forecast import ErrorSummary, error_summary
from specsim.replaying.intervals import NO_SPECULATION, Estimate, beyond_floor, paired_difference, simultaneous
from specsim.replaying.prediction import oracle_seconds, predict_policy, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.rounds import PARTS, RoundLog
from specsim.report.experiment import (
    BoardRow,
    Choice,
    Defect,
    Departures,
    Domain,
    ErrorParts,
    Histogram,
    JoinedRow,
    KCurve,
    Ladder,
    Load,
    Rate,
    Reliability,
    Row,
    SecondPass,
    SizeError,
)
from specsim.trace.trace import Trace

ROUND_FIELDS = [field.name for field in fields(Round)]
# Gap up to which two logits count as tied: the rounding of some tens of layers, each of a step or so.
NEAR_TIE_ULPS = 16.0
LOGARITHMIC = ("prob", "confidence", "top10_confidence")  # signals that are probabilities

What = Literal["draft", "text", "policy"]
Cause = Literal["near tie", "defect", "not examined"]


def validated_rows(outcome: Outcome, seed: int) -> list[Row]:
    """Compare the forecasts of an experiment with a single pair with what it measured; rows by measured speedup."""
    (name,), measurement = outcome.contenders, outcome.measured
    partly_known, priced = outcome.partly_known(name), PricedTrace(outcome.holdouts[name], outcome.run_cost(name))
    oracle_s = oracle_seconds(priced, [type(entry.candidate.policy) for entry in outcome.entries])
    arms = sorted(range(1, len(outcome.entries) + 1), key=lambda arm: -measurement.speedups[arm])
    return [
        replace(
            _row(measurement, arm, outcome.entries[arm - 1], priced, oracle_s, seed),
            **{
                "text_known_without_probe": None,
                **speedups_on(partly_known, outcome.entries[arm - 1].candidate.policy, seed),
            },
            resolved=None if arm == arms[0] else resolved(measurement, arm, arms[0]),
        )
        for arm in arms
    ]


def resolved(measurement: Measurement, arm: int, best: int) -> bool:
    """Tell whether two arms' measured speedups differ: by more than the noise floor, and significantly."""
    seconds, speedups = measurement.seconds, measurement.speedups
    difference = paired_difference(seconds[0], seconds[best], seconds[arm])
    return difference.significant and beyond_floor(measurement.noise_floor_percent, speedups[arm], speedups[best])


def _row(measurement: Measurement, arm: int, entry: Entry, priced: PricedTrace, oracle_s: Floats, seed: int) -> Row:
    """Compare an arm's runs with its replay at the costs of this run."""
    candidate, own_s = entry.candidate, measurement.seconds[arm]
    replayed = priced.replay(candidate.policy, seed=seed, log=True)
    runs, exact = measurement.last_runs(arm), not priced.trace.sampled_by_rejection
    same_rounds = rounds_identical(replayed, runs) if exact else None
    same_output = output_identical(priced.trace, runs) if exact else None
    departures: list[Divergence] = []
    if exact and not same_rounds == same_output == 1:
        assert replayed.rounds is not None
        decoder, prompts, log = measurement.arms[arm].decoder, measurement.prompts, replayed.rounds
        departures = divergences(decoder, candidate.policy, priced.trace, prompts, log, runs, seed=seed)
    measured, rate = measurement.speedups[arm], rate_of(own_s, measurement.baseline_tokens)
    wall_clock, rounds = measurement.wall_clock(arm, measured), measurement.typical_rounds(arm)
    row = compared_row(candidate, priced, replayed, oracle_s, measured, wall_clock, own_s, rounds, same_rounds)
    return replace(
        _with_rates(row, measurement, arm),
        forecast=entry.forecast.forecast,
        forecast_without_probe=entry.forecast.forecast_without_probe,
        output_identical_percent=None if same_output is None else 100 * same_output,
        sequence_tokens=[len(run.tokens) for run in runs],
        divergences=departures_summary(departures) if departures else None,
        tokens_per_s=rate.tokens_per_s,
        ms_per_token=rate.ms_per_token,
    )


def _with_rates(row: Row, measurement: Measurement, arm: int) -> Row:
    """Add mean acceptance length, overhead and draft acceptance rate of all repeats.

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
    return replace(
        row,
        measured_tau=tau,
        overhead=overhead,
        acceleration_over_overhead=tau / overhead,
        acceleration_over_overhead_off_percent=(tau / overhead / row.measured - 1) * 100,
        measured_v_d=float(metrics.draft_precision(accepted, drafted)),
    )


class Compared(NamedTuple):
    """What an arm measured, compared with its replay: these fields of a `JoinedRow`."""

    measured: Estimate
    wall_clock_speedup: Estimate
    wall_clock_differs: bool
    error_percent: float
    rounds_identical_percent: float
    output_identical_percent: float
    same_text_rounds_identical_percent: float | None


def compared(
    measurement: Measurement, arm: int, measured: Estimate, predicted: float, replayed: Replay, trace: Trace
) -> Compared:
    """Compare an arm of an exact trace with its replay. predicted : its speedup by replay"""
    runs = measurement.last_runs(arm)
    same = same_text_rounds_identical(trace, replayed, runs)
    return Compared(
        measured,
        *measurement.wall_clock(arm, measured),
        (predicted / measured - 1) * 100,
        100 * rounds_identical(replayed, runs),
        100 * output_identical(trace, runs),
        None if same is None else 100 * same,
    )


def rounds_identical(replayed: Replay, runs: Sequence[Decoded]) -> float:
    """Compute the share of replayed rounds that the real run has too, by t, tokens, last token and drafter."""
    real, wanted = _rounds_of(replayed, runs)
    return len(real.intersection(wanted)) / len(wanted)


def same_text_rounds_identical(trace: Trace, replayed: Replay, runs: Sequence[Decoded]) -> float | None:
    """Compute that share of the rounds that end before the first token that differs between run and recording.

    In low precision a numerical tie may change a token, and what follows is another text. None without such rounds.
    """
    same_until = []
    for index, run in enumerate(runs):
        text = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        differing = (t for t, (token, other) in enumerate(zip(text, run.tokens, strict=False)) if token != other)
        same_until.append(next(differing, len(text)))
    real, wanted = _rounds_of(replayed, runs)
    wanted = [row for row in wanted if row[1] + row[3] + 1 <= same_until[row[0]]]  # t, accepted tokens, and one more
    return len(real.intersection(wanted)) / len(wanted) if wanted else None


def _rounds_of(replayed: Replay, runs: Sequence[Decoded]) -> tuple[set[tuple[int, ...]], list[tuple[int, ...]]]:
    """List real and replayed rounds, each the number of the sequence and what `Decoded.full_log` gives."""
    assert replayed.rounds is not None
    real = {(index, *row) for index, run in enumerate(runs) for row in run.full_log()}
    log = replayed.rounds
    return real, [(*row, drafter) for row, drafter in zip(log.rows(), log.drafter.tolist(), strict=True)]


def output_identical(trace: Trace, runs: Sequence[Decoded]) -> float:
    """Compute the share of sequences whose real output equals the recorded output, token for token."""
    same = 0
    for index, run in enumerate(runs):
        recorded = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        same += recorded == run.tokens
    return same / len(runs)


@dataclass(frozen=True)
class Divergence:
    """A sequence's first departure from its replay.

    t : output position at which the round starts
    what : a drafted token, a token of the text, or how long the policy drafted differs
    gap_ulps : between the logits of what was chosen here and in the recording, or of a policy between its signals here
        and there in nats, in steps of the number type at the logits' size; None where it was not examined
    """

    sequence: int
    t: int
    what: What
    gap_ulps: float | None

    @property
    def cause(self) -> Cause:
        if self.gap_ulps is None:
            return "not examined"
        return "near tie" if self.gap_ulps <= NEAR_TIE_ULPS else "defect"


def ulp(value: float, dtype: torch.dtype) -> float:
    """The step between numbers of this type at the size of `value`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))


def divergences(
    decoder: Decoder,
    policy: Policy,
    trace: Trace,
    prompts: Sequence[Prompt],
    replayed: RoundLog,
    runs: Sequence[Decoded],
    *,
    seed: int,
) -> list[Divergence]:
    """Find the first departure of every sequence; of trees and several drafters, only its place.

    Parameters
    ----------
    decoder : that of the runs, or another over the same models
    prompts, runs : of the trace's sequences
    replayed : the replay's rounds on the trace
    seed : of the policy's uniforms in the runs
    """
    departures = []
    for index, run in enumerate(runs):
        mine = replayed.sequence == index
        columns = (replayed.t, replayed.drafted, replayed.accepted, replayed.verified, replayed.last, replayed.drafter)
        wanted = list(zip(*(column[mine].tolist() for column in columns), strict=True))
        text = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        number = _first_round(run, wanted, text)
        if number is None:
            continue
        t = run.rounds[number].t
        if not isinstance(policy, ChainPolicy) or isinstance(policy, SwitchPolicy):
            departures.append(Divergence(index, t, "text", None))
            continue
        state = runs[index - 1].state if index else None
        decoding = _Again(decoder, policy, trace, prompts[index], index, state, seed)
        departures.append(decoding.look_at(number, t, wanted[number][1], text))
    return departures


def departures_summary(departures: Sequence[Divergence]) -> Departures:
    """Count first departures by cause, with the largest gap of those that count as ties."""
    ties = [each.gap_ulps for each in departures if each.cause == "near tie" and each.gap_ulps is not None]
    causes: tuple[Cause, ...] = ("near tie", "defect", "not examined")
    return Departures(
        first={cause: sum(each.cause == cause for each in departures) for cause in causes},
        largest_tie_ulps=max(ties, default=None),
        defects=[Defect(**vars(each)) for each in departures if each.cause == "defect"],
    )


def _first_round(run: Decoded, wanted: Sequence[tuple[int, ...]], text: Sequence[int]) -> int | None:
    """The number of the first round that differs in the log or in what it emitted; None where all are the same."""
    end = 0
    for number, (real, row) in enumerate(zip(run.full_log(), wanted, strict=False)):
        end = real[0] + real[2] + 1
        if real != row or run.tokens[real[0] : end] != text[real[0] : end]:
            return number
    return None


class _Again:
    """One sequence decoded again, up to a round whose logits are read."""

    def __init__(
        self, decoder: Decoder, policy: Policy, trace: Trace, prompt: Prompt, index: int, state: Any, seed: int
    ):
        self.trace, self.index, self.number = trace, index, int(trace.sequence_id[index])
        self.decoder, self.policy = decoder, policy
        budget = int(trace.budget_tokens[index])
        self.decoding = Decoding(decoder, prompt.tokens, budget, policy, self.number, seed, state)

    def look_at(self, number: int, t: int, drafted: int, text: Sequence[int]) -> Divergence:
        """Decode up to a round and explain how it differs from the replay.

        number, t, drafted : the round's number, its first position, and the tokens that the replay drafted in it
        """
        for _ in range(number):
            self.decoding.advance()
        draft_lm = getattr(self.decoder.drafter, "lm", None)  # drafters without a model have no logits to read
        watched = nullcontext(list[torch.Tensor]()) if draft_lm is None else passes(draft_lm)
        with watched as of_draft, passes(self.decoder.target) as of_target:
            draft = self.decoding.advance()
        row = int(self.trace.offsets[self.index]) + t
        recorded = self.trace.draft_token[row].tolist()
        for depth, (token, other) in enumerate(zip(draft.tokens, recorded[:drafted], strict=False)):
            if token != other:
                logits = of_draft[depth][-1] if len(of_draft) == len(draft.tokens) else None
                gap = self._gap(logits, token, other, t + depth, noisy=self.decoder.sampler.noisy_drafter)
                return Divergence(self.index, t, "draft", gap)
        if len(draft.tokens) != drafted:
            return Divergence(self.index, t, "policy", self._signal_gap(draft.steps, row, of_draft))
        emitted = self.decoding.tokens[self.decoding.prompt_tokens + t :]
        for place, (token, other) in enumerate(zip(emitted, text[t:], strict=False)):
            if token != other:
                logits = of_target[-1][place] if of_target else None
                gap = self._gap(logits, token, other, t + place, noisy=self.decoder.sampler.noisy_target)
                return Divergence(self.index, t, "text", gap)
        return Divergence(self.index, t, "policy", None)

    def _gap(self, logits: torch.Tensor | None, token: int, other: int, position: int, noisy: bool) -> float | None:
        """Compute the gap between the scores of the token chosen here and the recorded token, in ulps of a logit.

        noisy : whether they were chosen by the noise of this output position
        """
        sampler: Sampler = self.decoder.sampler
        if logits is None or sampler.mode == "rejection":
            return None
        pair = logits[[token, other]].double()
        gap = float(pair[0] - pair[1])
        if noisy:
            noise = gumbel_noise(
                sampler.seed, self.number, position, 1, len(logits), logits.device, torch.float64
            ).flatten()
            gap += sampler.temperature * float(noise[token] - noise[other])
        return abs(gap) / self._ulp(pair)

    def _ulp(self, logits: torch.Tensor) -> float:
        """Return one unit in the last place of the largest logit, in the target's number type.

        Float32 logits are computed from values that are rounded to that type.
        """
        return ulp(float(logits.abs().max()), self.decoder.target.model.dtype)

    def _signal_gap(self, steps: Sequence[Step], row: int, of_draft: Sequence[torch.Tensor]) -> float | None:
        """Return the largest difference of a signal that the policy read, in ulps of the largest logit behind it."""
        if len(of_draft) != len(steps):
            return None
        gaps = [0.0]
        for depth, (step, logits) in enumerate(zip(steps, of_draft, strict=True)):
            for name in self.policy.features:
                here, there = getattr(step, name), float(getattr(self.trace, name)[row, depth])
                if name in LOGARITHMIC:
                    here, there = (math.log(max(value, torch.finfo(torch.float32).tiny)) for value in (here, there))
                gaps.append(abs(here - there) / self._ulp(logits[-1]))
        return max(gaps)


@contextmanager
def passes(lm: CachedLM) -> Iterator[list[torch.Tensor]]:
    """The logits of every pass of this model inside."""
    seen: list[torch.Tensor] = []
    forward = lm.forward

    def noted(tokens: Sequence[int]) -> torch.Tensor:
        logits = forward(tokens)
        seen.append(logits.clone())
        return logits

    attributes = vars(lm)  # where a name goes before the class's
    before = attributes.get("forward")
    attributes["forward"] = noted
    try:
        yield seen
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


class Promise(NamedTuple):
    """A policy's speedup as forecast before decoding, and its measured seconds per held-out sequence [S]."""

    label: str
    speedup: float
    seconds: Floats


def choice_of(forecasts: Sequence[Promise], baseline_s: Floats, floor_percent: float) -> Choice:
    """Compare the forecast's best with the measured best, both among all policies and no speculation.

    Parameters
    ----------
    baseline_s : measured seconds per sequence without speculation [S]
    floor_percent : noise floor, below which a difference is not significant

    Intervals hold for all candidates at once, because the best is picked on the same prompts.
    """
    everyone = [Promise(NO_SPECULATION, 1.0, baseline_s), *forecasts]
    chosen = max(everyone, key=lambda forecast: forecast.speedup)
    best = min(everyone, key=lambda forecast: float(forecast.seconds.sum()))
    places = [number for wanted in (best, chosen) for number, other in enumerate(everyone) if other is wanted]
    measured = simultaneous(baseline_s, [forecast.seconds for forecast in everyone])
    regret = measured.difference(*places)
    speedups = [measured.speedups[place] for place in places]
    return Choice(
        forecast=chosen.label,
        forecast_speedup=chosen.speedup,
        measured_speedup=speedups[1],
        measured=best.label,
        regret=regret.difference,
        significant=regret.significant and beyond_floor(floor_percent, *speedups),
    )


class MeasuredFacts(NamedTuple):
    """The baselines' runs and the forecast's choice, with names as in the document of an experiment."""

    load: Load
    null_arm: Estimate
    noise_floor_percent: float
    baseline: Rate
    choice: Choice | None


def measured_facts(measurement: Measurement, promises: Sequence[Promise]) -> MeasuredFacts:
    """Summarise the baselines' runs and the forecast's choice."""
    baseline_s, floor = measurement.seconds[0], measurement.noise_floor_percent
    return MeasuredFacts(
        Load(*measurement.load),
        measurement.null_arm,
        floor,
        rate_of(baseline_s, measurement.baseline_tokens),
        choice_of(promises, baseline_s, floor) if promises else None,
    )


def error_parts(priced: PricedTrace, replayed: Replay, rounds: Sequence[Sequence[Round]]) -> ErrorParts:
    """Compute predicted minus measured seconds, in percent of the policy's measured seconds.

    Parameters
    ----------
    priced, replayed : the trace under its costs, and the policy's replay on it
    rounds : measured, of every sequence of the trace
    """
    done = [round_ for sequence in rounds for round_ in sequence]
    measured_s = np.array([[getattr(round_, f"{part}_s") for part in PARTS] for round_ in done]).sum(axis=0)
    predicted_s = replayed.seconds.sum(axis=0)
    whole_s = measured_s.sum()
    parts = dict(zip(PARTS, (100 * (predicted_s - measured_s) / whole_s).tolist(), strict=True))
    table = priced.table(replayed.policy)
    verify_s = table.verify_s
    if isinstance(replayed.policy, TreePolicy):
        assert table.tree is not None
        verify_s = table.tree.verify_s
    contexts = np.concatenate(
        [
            int(prompt) - 1 + np.array([round_.t for round_ in sequence], dtype=np.int64)
            for prompt, sequence in zip(priced.trace.prompt_tokens, rounds, strict=True)
        ]
    )
    verified = np.array([round_.verified for round_ in done])
    took_s = np.array([round_.verify_s - round_.refeed_s for round_ in done])
    price_s = verify_s[verified + 1, contexts >> table.bucket_bits]
    by_verified = [
        SizeError(
            tokens=int(tokens),
            rounds=int((verified == tokens).sum()),
            verify=float(100 * (price_s - took_s)[verified == tokens].sum() / whole_s),
        )
        for tokens in np.unique(verified)
    ]
    refed, second_pass = np.array([round_.refed for round_ in done]), None
    if refed.any():
        price_s = table.refeed_s[refed, contexts >> table.bucket_bits][refed > 0].sum()  # row 0 is unused
        second_pass = SecondPass(
            rounds=int((refed > 0).sum()),
            predicted=float(100 * price_s / whole_s),
            measured=float(100 * sum(round_.refeed_s for round_ in done) / whole_s),
        )
    return ErrorParts(**parts, by_verified=by_verified, second_pass=second_pass)


def k_curve(priced: PricedTrace, seed: int) -> KCurve:
    """Predict the speedup of every fixed K."""
    lengths = range(1, priced.trace.depth + 1)
    curve = [predict_policy(priced, make_policy("fixed_k", {"k": k}), seed=seed) for k in lengths]
    return KCurve(list(lengths), [prediction.speedup for prediction in curve])


def accepted_histogram(replayed: Replay, runs: Sequence[Decoded], depth: int) -> Histogram:
    """Count the rounds of a policy by accepted tokens, predicted and measured."""
    assert replayed.rounds is not None
    measured = [round_.accepted for run in runs for round_ in run.rounds]
    counts = (np.bincount(accepted, minlength=depth + 1).tolist() for accepted in (replayed.rounds.accepted, measured))
    return Histogram(str(replayed.policy), *counts)


def reliability(trace: Trace) -> Reliability:
    """Bin the acceptance rate of verified tokens by the drafter's confidence."""
    bins = metrics.reliability(*verified_tokens(trace))
    return Reliability(
        edges=bins.edges.tolist(),
        count=bins.count.tolist(),
        mean_confidence=finite_or_null(bins.mean_confidence),
        accept_rate=finite_or_null(bins.accept_rate),
        ece=bins.ece,
    )


def forecasts_of(rows: Sequence[Row]) -> list[Promise]:
    """Return the forecasts made before anything was decoded, of the rows that have one."""
    made = [row.train_speedup if row.forecast is None else row.forecast.estimate for row in rows]
    return [
        Promise(row.label, speedup, np.array(row.sequence_seconds))
        for row, speedup in zip(rows, made, strict=True)
        if speedup is not None
    ]


def median_error(errors_percent: Sequence[float]) -> float:
    """Compute the median of absolute errors."""
    return float(np.median(np.abs(errors_percent)))


def errors_of(
    rows: Sequence[Row | JoinedRow | BoardRow], measured: Sequence[float], predicted: Sequence[float]
) -> dict[str, ErrorSummary]:
    """Summarise the errors of up to six replays against the measurement, by what each did not know.

    measured, predicted : speedups of the rows; predicted knew text and costs

    Returns
    -------
    dict
        "forecast" knew neither text nor costs; "text_known" the text; "costs_known" the costs of this run;
        "decomposition" both. "forecast_without_probe" and "text_known_without_probe" are there where a probe rescaled
        costs from before.
    """
    names = ("forecast", "forecast_without_probe", "text_known", "text_known_without_probe", "costs_known")
    speedups: dict[str, list[Any]] = {name: [getattr(row, name, None) for row in rows] for name in names}
    speedups["decomposition"] = [*predicted]
    return {name: error_summary(values, measured) for name, values in speedups.items() if None not in values}


def rate_of(seconds: Floats, tokens: int) -> Rate:
    """Compute tokens per second and milliseconds per token. seconds : of each sequence [S]; tokens : of all"""
    return Rate(tokens / float(seconds.sum()), 1e3 * float(seconds.sum()) / tokens)


def compared_row(
    candidate: Candidate,
    priced: PricedTrace,
    replayed: Replay,
    oracle_s: Floats,
    measured: Estimate,
    wall_clock: WallClock,
    own_s: Floats,
    rounds: Sequence[Sequence[Round]],
    same_rounds: float | None,
) -> Row:
    """Put a policy's replay beside its measurement on the same sequences.

    Parameters
    ----------
    oracle_s, own_s : seconds per sequence of the oracle, and as measured [S]
    rounds : of every sequence, each at the median of its repeats
    same_rounds : share of replayed rounds that the real run has too; None where the replay draws its own acceptance
    """
    predicted, policy = summarise(replayed, oracle_s), candidate.policy
    return Row(
        policy=policy.name,
        label=str(policy),
        params=policy.settings,
        role=candidate.role,
        predicted=predicted.speedup,
        measured=measured,
        wall_clock_speedup=wall_clock.speedup,
        wall_clock_differs=wall_clock.differs,
        train_speedup=candidate.train_speedup,
        error_percent=(predicted.speedup / measured - 1) * 100,
        truncated_share=predicted.truncated_share,
        rounds_identical_percent=None if same_rounds is None else 100 * same_rounds,
        ladder=Ladder(predicted.eq14, predicted.speedup.estimate, measured.estimate),
        error_parts=error_parts(priced, replayed, rounds),
        v_d=predicted.v_d,
        r_d=predicted.r_d,
        hm=predicted.hm,
        tau=predicted.tau,
        oracle_regret=predicted.oracle_regret,
        sequence_seconds=own_s.tolist(),
    )


def domains(holdout: Trace, replayed: Replay, baseline_s: Floats, own_s: Floats) -> dict[str, Domain]:
    """Compare a policy's speedup in replay and real run by domain of the prompts; seconds per sequence [S]."""
    parts = {name: holdout.domain == name for name in np.unique(holdout.domain).tolist()}
    return {
        name: Domain(
            int(part.sum()),
            int(holdout.output_tokens[part].sum()),
            float(replayed.autoregressive_s[part].sum() / replayed.speculative_s[part].sum()),
            float(baseline_s[part].sum() / own_s[part].sum()),
        )
        for name, part in parts.items()
    }


def rounds_table(outcome: Outcome) -> pa.Table:
    """Tabulate every real round of the last runs: tokens drafted and accepted, and seconds by phase."""
    (holdout,) = outcome.holdouts.values()
    policies = [entry.candidate.policy for entry in outcome.entries]
    rows = [
        {
            "policy": str(policy),
            "tree": isinstance(policy, TreePolicy),
            "sequence_id": sequence,
            "round": number,
            **{name: getattr(round_, name) for name in ROUND_FIELDS},
        }
        for arm, policy in enumerate(policies, start=1)
        for sequence, run in zip(holdout.sequence_id.tolist(), outcome.measured.last_runs(arm), strict=True)
        for number, round_ in enumerate(run.rounds)
    ]
    return pa.Table.from_pylist(rows)
