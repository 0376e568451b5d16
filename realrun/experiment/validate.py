"""A validation: tune every policy offline, predict, really decode, compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.experiment.divergence import Divergence, divergences
from realrun.experiment.error_parts import error_parts
from realrun.experiment.measured_costs import MeasuredCosts, Run
from realrun.experiment.measuring import Costs, measure_in_turns
from realrun.experiment.timing import check_repeats, make_arm, wall_clock
from realrun.machine_load import Load
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
from specsim.replaying.intervals import (
    Estimate,
    beyond_floor,
    noise_floor_percent,
    paired_difference,
    ratio_interval,
)
from specsim.replaying.prediction import Ladder, Prediction, ladder, oracle_seconds, summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

TUNED, DECODED = "tuned.json", "decoded"  # in the folder of a validation that is not whole


class TunedFile(TypedDict):
    """A policy's settings and where they come from, or the reason why it is none to validate."""

    params: NotRequired[dict[str, Any]]
    role: NotRequired[str]
    train_speedup: NotRequired[float]
    reason: NotRequired[str]


@dataclass(frozen=True)
class Candidate:
    """A policy to validate.

    role : where its settings come from: tuned, fitted, default or fixed_k
    train_speedup : forecast before anything was decoded, from tuning costs and tuning prompts; None where unknown
    """

    policy: Policy
    role: str
    train_speedup: float | None = None


@dataclass(frozen=True)
class Tuned:
    """What an earlier validation tuned, and the costs that it measured."""

    candidates: tuple[Candidate, ...]
    cost: ProfileCost


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
    """All rows, with the hold-out trace and the measured baseline behind them."""

    rows: list[Row]
    train: Trace
    holdout: Trace
    profile: dict[str, Any]  # the document of what rounds cost meanwhile, from the arms' own rounds and probes
    cost: ProfileCost  # the same as a cost model
    autoregressive_s: Floats
    baseline_tokens: int  # of the baseline's outputs, in `autoregressive_s` seconds
    null_arm: Estimate  # the baseline's seconds over those of a second baseline among the arms
    load: Load  # how busy others kept the machine while it was decoded
    environment: dict[str, Any]
    seed: int
    skipped: list[tuple[str, str]]  # (policy, reason) of those that trace or costs cannot serve

    @property
    def median_abs_error_percent(self) -> float:
        return float(np.median([abs(row.error_percent) for row in self.rows]))

    @property
    def p90_abs_error_percent(self) -> float:
        return float(np.quantile([abs(row.error_percent) for row in self.rows], 0.9))

    @property
    def noise_floor_percent(self) -> float:
        return noise_floor_percent(self.null_arm)

    def resolved(self, row: Row, best: Row) -> bool:
        """Whether two rows' measured speedups differ: by more than the noise floor, and significantly."""
        difference = paired_difference(self.autoregressive_s, best.speculative_s, row.speculative_s)
        speedups = row.measured.estimate, best.measured.estimate
        return difference.significant and beyond_floor(self.noise_floor_percent, *speedups)


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
    """What to validate: every policy that the trace can serve, in all its variants, tuned on `train`.

    With it the (policy, reason) of those that trace or costs cannot serve.

    kept : file of what is tuned, by and by; what is there is not tuned again
    """
    found: list[Candidate] = []
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
            if all(policy != candidate.policy for candidate in found):
                found.append(Candidate(policy, tuned[name]["role"], tuned[name].get("train_speedup")))
        if progress:
            progress("tune", done + 1, len(served))
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
        raise InputError(f"none of the policies can be validated here ({reasons}); choose others")
    return found, skipped


def _tuned(kind: type[Policy], variant: Variant, priced: PricedTrace, search: SearchSettings) -> dict[str, Any]:
    """A policy's settings and where they come from, or the reason why it cannot be validated."""
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
    *,
    kinds: Sequence[type[Policy]] | None = None,
    tuned: Sequence[Candidate] | None = None,
    trials: int = 100,
    repeats: int = 3,
    tuning_share: float = 0.5,
    seed: int = 0,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> Validation:
    """Tune on one part of the trace, then decode the hold-out prompts for real.

    Every prompt is decoded at once by the baseline, by a second baseline that shows what differs by chance (the null
    arm), and by every policy, in turns of a few rounds; probes of what no arm does often take turns too. Every round
    is taken at the median of its repeats, whose number is odd and at least 3. Policies are tuned under `cost`, and
    forecast by it; predictions use what rounds cost during the decoding itself. prompts[i] must be the prompt of the
    trace's sequence i.

    kinds : policies to compare, default all
    tuned : policies to compare as they are, in place of tuning `kinds`
    folder : where tuned policies and decoded sequences are kept, and read where they are; None keeps nothing
    """
    check_repeats(repeats)
    sampler = Sampler(**trace.meta["decoding"])
    tuning, held = split_sequences(trace, tuning_share=tuning_share, seed=seed)
    train, holdout = trace.select(tuning), trace.select(held)
    if tuned is None:
        kept = folder and folder / TUNED
        chosen, skipped = candidates(train, cost, kinds=kinds, trials=trials, seed=seed, progress=progress, kept=kept)
    else:
        chosen, skipped = list(tuned), []
    policies: list[Policy | None] = [None, *(candidate.policy for candidate in chosen), None]
    arms = [make_arm(str(policy), policy, pair, sampler) for policy in policies]
    texts = [prompts[sequence] for sequence in held.tolist()]
    costs = MeasuredCosts(
        pair, holdout, tree_tokens=cost.max_tree_tokens, sampler=sampler, seed=seed, texts=repeats * len(texts)
    )
    timings, load = measure_in_turns(
        arms,
        {"pair": Costs(costs, range(len(arms)))},
        texts,
        holdout,
        folder and folder / DECODED,
        repeats=repeats,
        seed=seed,
        progress=lambda done, total: progress("decode", done, total) if progress else None,
    )
    everything = range(len(texts))

    def runs(arm: int, index: int, rounds: list[Round]) -> Run:
        return policies[arm], len(texts[index].tokens), rounds

    typical = [[timings.rounds(arm, index) for index in everything] for arm in range(len(arms))]

    def runs_of(chosen: Iterable[int]) -> Iterator[Run]:
        return (runs(arm, index, typical[arm][index]) for arm in chosen for index in everything)

    document = costs.document(runs_of(range(len(arms))), repeats)
    cost = profile_from_json(document, "just measured")

    def cost_of(left_out: int) -> ProfileCost:
        """What rounds cost by all arms but one, and by the probes."""
        others = runs_of(arm for arm in range(len(arms)) if arm != left_out)
        return profile_from_json(costs.document(others, repeats), "just measured")

    baseline_s, *arms_s, null_s = (timings.seconds_for_baseline(arm, everything) for arm in range(len(arms)))
    kinds_run = [type(candidate.policy) for candidate in chosen]
    priced = PricedTrace(holdout, cost)
    oracle_s = oracle_seconds(priced, kinds_run, seed=seed)
    round_s = [timings.mean_round_s(arm, everything) for arm in range(len(arms))]

    def first_departures(number: int, replayed: Replay) -> list[Divergence]:
        own_runs, log = timings.last_runs(number, everything), replayed.rounds
        if holdout.approximate or rounds_identical(replayed, own_runs) == output_identical(holdout, own_runs) == 1:
            return []
        assert log is not None
        arm, policy = arms[number], chosen[number - 1].policy
        return divergences(arm.decoder, policy, holdout, texts, log, own_runs, seed=seed)

    null_arm = ratio_interval(baseline_s, null_s)
    baseline_wall_s = timings.wall_s_for_baseline(0, everything)
    rows = []
    for number, candidate in enumerate(chosen, start=1):
        replayed = priced.replay(candidate.policy, seed=seed, log=True)
        own_s = arms_s[number - 1]
        own_runs = timings.last_runs(number, everything)
        done = [one for index in everything for run in timings.runs[number, index] for one in run.rounds]
        accepted, drafted = (sum(getattr(one, what) for one in done) for what in ("accepted", "drafted"))
        measured = ratio_interval(baseline_s, own_s)
        wall_s = timings.wall_s_for_baseline(number, everything)
        emitted = sum(len(run.tokens) for index in everything for run in timings.runs[number, index])
        rows.append(
            Row(
                candidate=candidate,
                replayed=replayed,
                predicted=summarise(replayed, oracle_s),
                unseen=PricedTrace(holdout, cost_of(number)).replay(candidate.policy, seed=seed).speedup,
                measured=measured,
                wall_clock=wall_clock(baseline_wall_s, wall_s, measured, noise_floor_percent(null_arm)),
                ladder=ladder(holdout, candidate.policy, cost, seed=seed),
                error_parts=error_parts(priced, replayed, typical[number]),
                speculative_s=own_s,
                runs=own_runs,
                measured_tau=emitted / len(done),
                overhead=round_s[number] / round_s[0],
                measured_v_d=float(metrics.draft_precision(accepted, drafted)),
                rounds_identical=None if holdout.approximate else rounds_identical(replayed, own_runs),
                output_identical=None if holdout.approximate else output_identical(holdout, own_runs),
                divergences=first_departures(number, replayed),
            )
        )
    return Validation(
        rows=rows,
        train=train,
        holdout=holdout,
        profile=document,
        cost=cost,
        autoregressive_s=baseline_s,
        baseline_tokens=sum(len(run.tokens) for run in timings.last_runs(0, everything)),
        null_arm=null_arm,
        load=load,
        environment=pair.environment,
        seed=seed,
        skipped=skipped,
    )


def rounds_identical(replayed: Replay, runs: Sequence[Decoded]) -> float:
    """Share of replayed rounds that the real run did just so: t, drafted, accepted, verified tokens, last, drafter."""
    assert replayed.rounds is not None
    real = {(index, *row) for index, run in enumerate(runs) for row in run.full_log()}
    log = replayed.rounds
    wanted = [(*row, drafter) for row, drafter in zip(log.rows(), log.drafter.tolist(), strict=True)]
    return len(real.intersection(wanted)) / len(log)


def output_identical(trace: Trace, runs: Sequence[Decoded]) -> float:
    """Share of sequences whose real output equals the recorded one, token for token."""
    same = 0
    for index, run in enumerate(runs):
        recorded = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        same += recorded == run.tokens
    return same / len(runs)
