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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler, gumbel_noise
from realrun.experiment.forecast import Forecast, speedups_on
from realrun.experiment.measuring import Measurement
from realrun.experiment.pipeline import Outcome
from realrun.experiment.settings import Candidate
from realrun.experiment.timing import WallClock
from realrun.lm.cached import CachedLM
from realrun.pairs.prompts import Prompt
from specsim.acceptance import formulas as metrics
from specsim.cost.profile import Profile
from specsim.io.arrays import Floats
from specsim.learn.calibration import verified_tokens
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.registry import make_policy
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.forecast import error_summary
from specsim.replaying.intervals import (
    NO_SPECULATION,
    Estimate,
    beyond_floor,
    paired_difference,
    ratio_interval,
    simultaneous,
)
from specsim.replaying.prediction import Prediction, oracle_seconds, predict_policy, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.rounds import PARTS, RoundLog
from specsim.trace.trace import Trace

ROUND_FIELDS = [field.name for field in fields(Round)]
# Gap up to which two logits count as tied: the rounding of some tens of layers, each of a step or so.
NEAR_TIE_ULPS = 16.0
LOGARITHMIC = ("prob", "confidence", "top10_confidence")  # signals that are probabilities

What = Literal["draft", "text", "policy"]
Cause = Literal["near tie", "defect", "not examined"]


@dataclass(frozen=True)
class Row:
    """A policy's prediction and measurement on the same sequences.

    Parameters
    ----------
    forecast : of the speedup, None without one
    replays : "text_known", the speedup by replay of the held-out text at the costs of the forecast; "costs_known", by
        replay of the tuning text at the costs of this run; "forecast" and "text_known" also "_without_probe", None
        unless a probe rescaled the costs
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
    wall_clock: WallClock
    speculative_s: Floats
    rounds: Sequence[Sequence[Round]]
    runs: list[Decoded]
    rounds_identical: float | None  # None where the replay draws its own acceptance
    text: Mapping[str, Any] = field(default_factory=dict)
    forecast: Estimate | None = None
    replays: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def error_percent(self) -> float:
        return (self.predicted.speedup.estimate / self.measured.estimate - 1) * 100


@dataclass(frozen=True)
class Validation:
    """All rows, with the forecast before and the measurement behind them."""

    rows: list[Row]
    forecast: Forecast
    holdout: Trace
    profile: Profile  # of what rounds cost meanwhile, from the arms' own rounds and probes
    measurement: Measurement
    environment: dict[str, Any]
    seed: int

    def resolved(self, row: Row, best: Row) -> bool:
        """Whether two rows' measured speedups differ: by more than the noise floor, and significantly."""
        difference = paired_difference(self.measurement.seconds[0], best.speculative_s, row.speculative_s)
        speedups = row.measured.estimate, best.measured.estimate
        return difference.significant and beyond_floor(self.measurement.noise_floor_percent, *speedups)


def validation_of(outcome: Outcome, seed: int) -> Validation:
    """Compare the forecasts of an experiment with a single pair with what it measured."""
    (name,), measurement = outcome.contenders, outcome.measurement
    assert measurement is not None
    holdout, partly_known = outcome.holdouts[name], outcome.partly_known(name)
    priced = PricedTrace(holdout, outcome.run_cost(name))
    oracle_s = oracle_seconds(priced, [type(entry.candidate.policy) for entry in outcome.entries])
    rows = [
        replace(
            _row(measurement, arm, entry.candidate, priced, oracle_s, seed),
            forecast=entry.forecast.speedup,
            replays={
                "forecast_without_probe": entry.forecast.forecast_without_probe,
                "text_known_without_probe": None,
                **speedups_on(partly_known, entry.candidate.policy, seed),
            },
        )
        for arm, entry in enumerate(outcome.entries, start=1)
    ]
    (profile,) = outcome.profiles[name]
    environment = outcome.contenders[name].pair.environment
    return Validation(rows, outcome.forecast, holdout, profile, measurement, environment, seed)


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
    runs, exact = measurement.last_runs(arm), not priced.trace.sampled_by_rejection
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
            text["divergences"] = departures_summary(departures)
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
    same = same_text_rounds_identical(trace, replayed, runs)
    return {
        "measured": measured.as_dict(),
        **measurement.wall_clock(arm, measured).as_dict(),
        "error_percent": (predicted / measured.estimate - 1) * 100,
        "rounds_identical_percent": 100 * rounds_identical(replayed, runs),
        "output_identical_percent": 100 * output_identical(trace, runs),
        "same_text_rounds_identical_percent": None if same is None else 100 * same,
    }


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


def departures_summary(departures: Sequence[Divergence]) -> dict[str, Any]:
    """Count first departures by cause, with the largest gap of those that count as ties, as JSON."""
    ties = [each.gap_ulps for each in departures if each.cause == "near tie" and each.gap_ulps is not None]
    counts = {
        cause: sum(each.cause == cause for each in departures) for cause in ("near tie", "defect", "not examined")
    }
    defects = [
        {"sequence": each.sequence, "t": each.t, "what": each.what, "gap_ulps": each.gap_ulps}
        for each in departures
        if each.cause == "defect"
    ]
    return {"first": counts, "largest_tie_ulps": max(ties, default=None), "defects": defects}


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


def choice_of(forecasts: Sequence[Promise], baseline_s: Floats, floor_percent: float) -> dict[str, Any]:
    """Compare the forecast's best with the measured best, both among all policies and no speculation.

    Parameters
    ----------
    baseline_s : measured seconds per sequence without speculation [S]
    floor_percent : noise floor, below which a difference is not significant

    Returns
    -------
    dict
        "forecast" and "measured", the labels of the two best; "forecast_speedup" and "measured_speedup" of the
        forecast's best; "regret", the measured best's speedup less that; and "significant". Intervals hold for all
        candidates at once, because the best is picked on the same prompts.
    """
    everyone = [Promise(NO_SPECULATION, 1.0, baseline_s), *forecasts]
    chosen = max(everyone, key=lambda forecast: forecast.speedup)
    best = min(everyone, key=lambda forecast: float(forecast.seconds.sum()))
    places = [number for wanted in (best, chosen) for number, other in enumerate(everyone) if other is wanted]
    measured = simultaneous(baseline_s, [forecast.seconds for forecast in everyone])
    regret = measured.difference(*places)
    speedups = [measured.speedups[place] for place in places]
    return {
        "forecast": chosen.label,
        "forecast_speedup": chosen.speedup,
        "measured_speedup": speedups[1].as_dict(),
        "measured": best.label,
        "regret": regret.difference.as_dict(),
        "significant": regret.significant and beyond_floor(floor_percent, *(speedup.estimate for speedup in speedups)),
    }


def measured_facts(measurement: Measurement, promises: Sequence[Promise]) -> dict[str, Any]:
    """Summarise the baselines' runs and the forecast's choice, as JSON."""
    baseline_s, floor = measurement.seconds[0], measurement.noise_floor_percent
    return {
        "load": measurement.load._asdict(),
        "null_arm": measurement.null_arm.as_dict(),
        "noise_floor_percent": floor,
        "baseline": rate_of(baseline_s, measurement.baseline_tokens),
        "choice": choice_of(promises, baseline_s, floor) if promises else None,
    }


def error_parts(priced: PricedTrace, replayed: Replay, rounds: Sequence[Sequence[Round]]) -> dict[str, Any]:
    """Compute predicted minus measured seconds, in percent of the policy's measured seconds.

    Parameters
    ----------
    priced, replayed : the trace under its costs, and the policy's replay on it
    rounds : measured, of every sequence of the trace

    Returns
    -------
    dict
        "draft", "policy", "verify" and "other", which sum to the error of the whole; and "by_verified": for each
        number of tokens verified beside the pending one, how many rounds there were and the error of their
        verification. A positive error is a part predicted to take longer than it did. If the target has recurrent
        layers and fed tokens again, also "second_pass": the number of rounds with a second pass, and its predicted and
        measured share of the total time in percent.
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
        {
            "tokens": int(tokens),
            "rounds": int((verified == tokens).sum()),
            "verify": float(100 * (price_s - took_s)[verified == tokens].sum() / whole_s),
        }
        for tokens in np.unique(verified)
    ]
    refed = np.array([round_.refed for round_ in done])
    if not refed.any():
        return {**parts, "by_verified": by_verified}
    price_s = table.refeed_s[refed, contexts >> table.bucket_bits][refed > 0].sum()  # row 0 is unused
    second_pass = {
        "rounds": int((refed > 0).sum()),
        "predicted": float(100 * price_s / whole_s),
        "measured": float(100 * sum(round_.refeed_s for round_ in done) / whole_s),
    }
    return {**parts, "by_verified": by_verified, "second_pass": second_pass}


def as_document(validation: Validation) -> dict[str, Any]:
    """Return the JSON form of a validation, which its report is rendered from."""
    rows = sorted(validation.rows, key=lambda row: -row.measured.estimate)
    holdout, measurement = validation.holdout, validation.measurement
    best = rows[0]
    errors = [abs(row.error_percent) for row in rows]
    documents = [
        {
            **row_document(row),
            **rate_of(row.speculative_s, measurement.baseline_tokens),
            "resolved": None if row is best else validation.resolved(row, best),
        }
        for row in rows
    ]
    return {
        "kind": "specsim-validation",
        "target": holdout.meta["target"],
        "drafter": holdout.meta["drafter"],
        "drafter_kind": holdout.meta.get("drafter_kind", "model"),
        "drafter_facts": holdout.meta.get("drafter_facts", {}),
        "block_expansion": validation.profile.as_dict()["block_expansion"],
        "device": validation.environment["device"],
        "dtype": validation.environment["dtype"],
        "decoding": holdout.meta["decoding"],
        "environment": validation.environment,
        "sequences": validation.forecast.sequences,
        "forecast": validation.forecast.summary(),
        "output_tokens": int(holdout.output_tokens.sum()),
        "distinct_trigram_share": holdout.meta["distinct_trigram_share"],
        "first_token_accepted_share": holdout.meta["first_token_accepted_share"],
        "autoregressive_sequence_seconds": measurement.seconds[0].tolist(),
        **measured_facts(measurement, forecasts_of(rows)),
        "rows": documents,
        "median_abs_error_percent": float(np.median(errors)),
        "p90_abs_error_percent": float(np.quantile(errors, 0.9)),
        "errors": errors_of(documents),
        "k_curve": _k_curve(validation),
        "accepted_histogram": _accepted_histogram(best, holdout.depth),
        "reliability": _reliability(holdout),
        "domains": _domains(validation, best),
    }


def _k_curve(validation: Validation) -> dict[str, Any]:
    """Predict the speedup of every fixed K."""
    priced = PricedTrace(validation.holdout, validation.profile.cost)
    lengths = range(1, validation.holdout.depth + 1)
    curve = [predict_policy(priced, make_policy("fixed_k", {"k": k}), seed=validation.seed) for k in lengths]
    return {"k": list(lengths), "predicted": [prediction.speedup.as_dict() for prediction in curve]}


def _accepted_histogram(row: Row, depth: int) -> dict[str, Any]:
    """Count the rounds of a policy by accepted tokens, predicted and measured."""
    assert row.replayed.rounds is not None
    measured = [round_.accepted for run in row.runs for round_ in run.rounds]
    return {
        "label": str(row.candidate.policy),
        "predicted": np.bincount(row.replayed.rounds.accepted, minlength=depth + 1).tolist(),
        "measured": np.bincount(measured, minlength=depth + 1).tolist(),
    }


def _reliability(trace: Trace) -> dict[str, Any]:
    """Bin the acceptance rate of verified tokens by the drafter's confidence."""
    bins = metrics.reliability(*verified_tokens(trace))
    return {
        "edges": bins.edges.tolist(),
        "count": bins.count.tolist(),
        "mean_confidence": [None if np.isnan(x) else x for x in bins.mean_confidence.tolist()],
        "accept_rate": [None if np.isnan(x) else x for x in bins.accept_rate.tolist()],
        "ece": bins.ece,
    }


def forecasts_of(rows: Sequence[Row]) -> list[Promise]:
    """Return the forecasts made before anything was decoded, of the rows that have one."""
    made = [row.candidate.train_speedup if row.forecast is None else row.forecast.estimate for row in rows]
    return [
        Promise(str(row.candidate.policy), speedup, row.speculative_s)
        for row, speedup in zip(rows, made, strict=True)
        if speedup is not None
    ]


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarise the errors of up to six replays against the measurement, by what each did not know.

    rows : documents of rows

    Returns
    -------
    dict
        "forecast" knew neither text nor costs; "text_known" the text; "costs_known" the costs of this run;
        "decomposition" both. "forecast_without_probe" and "text_known_without_probe" are there where a probe rescaled
        costs from before.
    """
    speedups = {
        "forecast": [(row.get("forecast") or {}).get("estimate") for row in rows],
        **{
            name: [row.get(name) for row in rows]
            for name in ("forecast_without_probe", "text_known", "text_known_without_probe", "costs_known")
        },
        "decomposition": [row["predicted"]["estimate"] for row in rows],
    }
    measured = [row["measured"]["estimate"] for row in rows]
    return {name: error_summary(values, measured) for name, values in speedups.items() if None not in values}


def rate_of(seconds: Floats, tokens: int) -> dict[str, float]:
    """Compute tokens per second and milliseconds per token. seconds : of each sequence [S]; tokens : of all"""
    return {"tokens_per_s": tokens / float(seconds.sum()), "ms_per_token": 1e3 * float(seconds.sum()) / tokens}


def row_document(row: Row) -> dict[str, Any]:
    """Return the JSON form of a row."""
    predicted, priced, policy = row.predicted, row.priced, row.candidate.policy
    return {
        "policy": policy.name,
        "label": str(policy),
        "params": policy.settings,
        "role": row.candidate.role,
        "predicted": predicted.speedup.as_dict(),
        "measured": row.measured.as_dict(),
        **row.wall_clock.as_dict(),
        "train_speedup": row.candidate.train_speedup,
        "error_percent": row.error_percent,
        "truncated_share": predicted.truncated_share,
        "rounds_identical_percent": None if row.rounds_identical is None else 100 * row.rounds_identical,
        "ladder": {
            "eq14": predicted.eq14,
            "profile": predicted.speedup.estimate,
            "measured": row.measured.estimate,
        },
        **({} if row.forecast is None else {"forecast": row.forecast.as_dict()}),
        **row.replays,
        "error_parts": error_parts(priced, row.replayed, row.rounds),
        **{name: getattr(predicted, name) for name in ("v_d", "r_d", "hm", "tau", "oracle_regret")},
        "sequence_seconds": row.speculative_s.tolist(),
        **row.text,
    }


def _domains(validation: Validation, best: Row) -> dict[str, Any]:
    holdout = validation.holdout
    result = {}
    for domain in np.unique(holdout.domain).tolist():
        members = holdout.domain == domain
        replayed = best.replayed
        result[domain] = {
            "sequences": int(members.sum()),
            "output_tokens": int(holdout.output_tokens[members].sum()),
            "predicted_speedup_best": float(
                replayed.autoregressive_s[members].sum() / replayed.speculative_s[members].sum()
            ),
            "measured_speedup_best": float(
                validation.measurement.seconds[0][members].sum() / best.speculative_s[members].sum()
            ),
        }
    return result


def rounds_table(validation: Validation) -> pa.Table:
    """Tabulate every real round of the last runs: tokens drafted and accepted, and seconds by phase."""
    rows = [
        {
            "policy": str(row.candidate.policy),
            "tree": isinstance(row.candidate.policy, TreePolicy),
            "sequence_id": sequence,
            "round": number,
            **{name: getattr(round_, name) for name in ROUND_FIELDS},
        }
        for row in validation.rows
        for sequence, run in zip(validation.holdout.sequence_id.tolist(), row.runs, strict=True)
        for number, round_ in enumerate(run.rounds)
    ]
    return pa.Table.from_pylist(rows)
