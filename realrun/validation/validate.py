"""A validation: tune every policy offline, predict, really decode, compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.provenance import provenance
from realrun.validation.timing import Arm, Timings, decoding, take_turns
from speckernels import backend_for
from specsim.arrays import Floats
from specsim.cost.profile import ProfileCost
from specsim.errors import InputError
from specsim.fitting.fit import needs_fitting
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES
from specsim.progress import Progress
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.speedup import formulas as metrics
from specsim.speedup.intervals import Estimate, ratio_interval
from specsim.speedup.prediction import Ladder, Prediction, ladder, oracle_seconds, summarise
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from specsim.tuning.settings import SearchSettings
from specsim.tuning.variants import applicable_variants, fit_variant, label


@dataclass(frozen=True)
class Candidate:
    """A policy to validate and where its settings come from: tuned, fitted, default or fixed_k."""

    policy: Policy
    role: str


@dataclass(frozen=True)
class Row:
    """One policy: what was predicted and what was measured on the same sequences."""

    candidate: Candidate
    replayed: Replay
    predicted: Prediction
    measured: Estimate
    ladder: Ladder
    speculative_s: Floats  # measured, per sequence
    runs: list[Decoded]  # the last run of every sequence
    measured_tau: float
    overhead: float  # mean seconds of a round over those of an autoregressive step, measured
    measured_v_d: float
    rounds_identical: float | None  # None where the replay draws its own acceptance
    output_identical: float | None

    @property
    def acceleration_over_overhead(self) -> float:
        """Speedup by MEDUSA's relation: tokens per round, over what a round costs in autoregressive steps.

        It differs from `measured` in two things alone: it takes the mean of a sequence's repeats and
        not their median, and does not correct for an output that is longer or shorter than the baseline's.

        Reference: Cai et al. 2024, arXiv:2401.10774, section 4.
        """
        return self.measured_tau / self.overhead

    @property
    def error_percent(self) -> float:
        return (self.predicted.speedup.estimate / self.measured.estimate - 1) * 100


@dataclass(frozen=True)
class Validation:
    """All rows, with the hold-out trace and the measured baseline behind them."""

    rows: list[Row]
    train: Trace
    holdout: Trace
    profile: ProfileCost
    autoregressive_s: Floats
    environment: dict[str, Any]
    seed: int
    skipped: list[tuple[str, str]]  # (policy, reason) of those that trace or costs cannot serve

    @property
    def median_abs_error_percent(self) -> float:
        return float(np.median([abs(row.error_percent) for row in self.rows]))


def candidates(
    train: Trace,
    cost: ProfileCost,
    *,
    kinds: Sequence[type[Policy]] | None = None,
    trials: int,
    seed: int,
    progress: Progress | None = None,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """What to validate: every policy that the trace can serve, in all its variants, tuned on `train`.

    With it the (policy, reason) of those that trace or costs cannot serve.
    """
    found: list[Candidate] = []
    priced = PricedTrace(train, cost)
    served, skipped = applicable_variants(train, POLICIES.values() if kinds is None else kinds, cost)
    for done, (kind, variant) in enumerate(served):
        role = (
            "tuned"
            if variant.tuned
            else "fixed_k"
            if kind is FixedK
            else "fitted"
            if needs_fitting(kind)
            else "default"
        )
        try:
            policy = fit_variant(kind, variant, priced, SearchSettings(trials=trials, seed=seed))
            check_replayable(train, policy)
            check_covered(train, policy, priced.table(policy))
            if all(policy != candidate.policy for candidate in found):
                found.append(Candidate(policy, role))
        except InputError as error:  # such as a tree larger than those profiled
            skipped.append((label(kind, variant), str(error)))
        if progress:
            progress("tune", done + 1, len(served))
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        raise InputError(f"none of the policies can be validated here ({reasons}); choose others")
    return found, skipped


def predict_and_measure(
    pair: Pair,
    trace: Trace,
    prompts: Sequence[Prompt],
    cost: ProfileCost,
    *,
    kinds: Sequence[type[Policy]] | None = None,
    trials: int = 100,
    repeats: int = 3,
    tuning_share: float = 0.5,
    seed: int = 0,
    reprofile: Callable[[], ProfileCost] | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Tune on one part of the trace, then decode the hold-out prompts for real.

    Every prompt is decoded by the baseline and by every policy, in an order shuffled
    anew each time. Policies are tuned under `cost`; `reprofile`, if given, is called after
    every repeat and returns the profile refined by what it measured, and predictions use its
    last answer, since a shared machine drifts. A sequence's time is the median of its
    repeats. prompts[i] must be the prompt of the trace's sequence i. kinds : policies to
    compare, default all.
    """
    if repeats < 1:
        raise InputError(f"repeats={repeats}; give at least 1")
    sampler = Sampler(**trace.meta["decoding"])
    tuning, held = split_sequences(trace, tuning_share=tuning_share, seed=seed)
    train, holdout = trace.select(tuning), trace.select(held)
    chosen, skipped = candidates(train, cost, kinds=kinds, trials=trials, seed=seed, progress=progress)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    arms = [Arm("autoregressive", None, decoder), *(Arm(str(c.policy), c.policy, decoder) for c in chosen)]
    step = decoding(arms, [prompts[sequence] for sequence in held.tolist()], holdout, seed)
    timings, order, turns = Timings(len(arms)), np.random.default_rng(seed), len(held) * len(arms)
    for repeat in range(repeats):
        if trace.approximate:  # one text says little of a replay that averages over outcomes
            decoder.sampler = replace(sampler, seed=sampler.seed + repeat)

        def report(done: int, before: int = repeat * turns) -> None:
            if progress:
                progress("decode", before + done, repeats * turns)

        take_turns(len(arms), range(len(held)), step, order, timings, report)
        if reprofile is not None:
            cost = reprofile()

    everything = range(len(held))
    wanted = np.array([len(run.tokens) for run in timings.last_runs(0, everything)])

    def arm_seconds(arm: int) -> Floats:
        """Seconds per sequence, for as many tokens as the baseline emitted there.

        In low precision an output may differ from the baseline's, in length too.
        """
        emitted = np.array([len(run.tokens) for run in timings.last_runs(arm, everything)])
        return np.asarray(timings.median_s(arm, everything) * wanted / emitted)

    def round_seconds(arm: int) -> float:
        """Mean over the rounds of all repeats."""
        return float(np.sum([timings.seconds[arm, i] for i in everything]) / timings.rounds[arm])

    baseline_s = arm_seconds(0)
    kinds_run = [type(candidate.policy) for candidate in chosen]
    priced = PricedTrace(holdout, cost)
    oracle_s = oracle_seconds(priced, kinds_run, seed=seed)
    rows = []
    for number, candidate in enumerate(chosen, start=1):
        replayed = priced.replay(candidate.policy, seed=seed, log=True)
        own_s = arm_seconds(number)
        own_runs = timings.last_runs(number, everything)
        rows.append(
            Row(
                candidate=candidate,
                replayed=replayed,
                predicted=summarise(replayed, oracle_s),
                measured=ratio_interval(baseline_s, own_s),
                ladder=ladder(holdout, candidate.policy, cost, seed=seed),
                speculative_s=own_s,
                runs=own_runs,
                measured_tau=float(timings.emitted[number] / timings.rounds[number]),
                overhead=round_seconds(number) / round_seconds(0),
                measured_v_d=float(metrics.draft_precision(timings.accepted[number], timings.drafted[number])),
                rounds_identical=None if holdout.approximate else rounds_identical(replayed, own_runs),
                output_identical=None if holdout.approximate else output_identical(holdout, own_runs),
            )
        )
    environment = {**provenance(pair.device, pair.dtype), "kernels": backend_for(pair.device)}
    return Validation(rows, train, holdout, cost, baseline_s, environment, seed, skipped)


def rounds_identical(replayed: Replay, runs: Sequence[Decoded]) -> float:
    """Share of replayed rounds that the real run did just so: t, drafted, accepted and verified tokens, the last."""
    assert replayed.rounds is not None
    real = {(index, *row) for index, run in enumerate(runs) for row in run.tree_log()}
    return len(real.intersection(replayed.rounds.rows())) / len(replayed.rounds)


def output_identical(trace: Trace, runs: Sequence[Decoded]) -> float:
    """Share of sequences whose real output equals the recorded one, token for token."""
    same = 0
    for index, run in enumerate(runs):
        recorded = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        same += recorded == run.tokens
    return same / len(runs)
