"""Scripted acceptance: true shapes with random weights, accepted and rejected as a trace says.

All compute is real: draft steps, copies to the host, policy decisions, target passes, caches.
Only the text is not: what is accepted, and what the policy sees of each drafted token, is
read from a dense trace, position by position, so that rounds are those of the replay. This
validates predicted time at the size of models whose weights are not at hand.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.random_pair import random_pair, vocabulary
from realrun.pairs.shapes import describe
from realrun.profiling.profile import profile
from realrun.profiling.trees import Samples
from realrun.provenance import provenance
from realrun.validation.document import row_document
from realrun.validation.scripted_decoder import ScriptedDecoder, with_prefix
from realrun.validation.validate import Candidate, Row, candidates, rounds_identical
from specsim.cost.contexts import context_range
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.errors import InputError
from specsim.policy.chain.base import ChainPolicy
from specsim.replaying.checks import check_replayable
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.speedup.chain_oracle import chain_oracle_seconds
from specsim.speedup.intervals import ratio_interval
from specsim.speedup.prediction import ladder, summarise
from specsim.trace.outcomes import as_recorded
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

KIND, VERSION = "specsim-scripted", 1
SLICE_REPEATS = 10  # of the profile, before the runs and after every repeat of them
PROFILE_CONTEXTS = 4
LEAST_SEQUENCES = 2  # run whatever the time, since an interval needs them

Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass
class _Runs:
    """Seconds and rounds of every (arm, sequence); arm 0 is the baseline."""

    seconds: dict[tuple[int, int], list[float]]
    rounds: dict[tuple[int, int], list[Round]]
    sequence_runs: int = 0
    complete_repeats: int = 0
    longest_s: float = 0.0  # of a sequence's runs, on the wall clock


def scripted_validation(
    pair: Pair,
    trace: Trace,
    *,
    context: int = 0,
    policies: Sequence[ChainPolicy] | None = None,
    trials: int = 100,
    repeats: int = 3,
    sampler: Sampler | None = None,
    seed: int = 0,
    minutes: float | None = None,
    begun: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Predict and really run the trace's rounds on this pair; the result as a JSON document.

    context : tokens of random text put before every prompt, so that long contexts can be validated
    policies : default: tuned on one half of the sequences, as in `realrun.validation.validate`, and run on the other
    sampler : how tokens are chosen, default greedy; the trace's own mode does not matter here
    minutes : of profiling and running together. Sequences are run in random order, and none is
        begun that would not be done in that time; the first two are run whatever the time
    begun : on time.monotonic(), when the minutes begin, default now

    Every sequence is run by every policy in shuffled order, with a burst of the autoregressive
    baseline before each; together the bursts cover the sequence once. A sequence's time is the
    median of its repeats. The profile is taken in slices between the repeats, since machines drift.
    """
    begun = time.monotonic() if begun is None else begun
    deadline = np.inf if minutes is None else begun + 60 * minutes
    sampler, report = sampler or Sampler(), progress or (lambda what, done, total: None)
    if repeats < 1 or context < 0:
        raise InputError(f"repeats={repeats}, context={context}; give at least 1 and 0")
    vocabulary(pair)
    trace = as_recorded(with_prefix(trace, context))  # runs take what was accepted from the trace
    for policy in policies or ():
        check_replayable(trace, policy)
        if policy.carries_state:  # sequences are run in random order, and not always all of them
            raise InputError(f"policy {policy} carries its state over sequences; let it start anew with each")
    slices = _Slices(pair, trace, sampler, seed, repeats, report)
    cost = slices.measure()
    if policies is None:
        tuning, held = split_sequences(trace, seed=seed)
        train, holdout = trace.select(tuning), trace.select(held)
        chosen, _ = candidates(train, cost, trials=trials, seed=seed, progress=progress)
    else:
        train, holdout = trace.select([]), trace
        chosen = [Candidate(policy, "given") for policy in policies]
    runner = ScriptedDecoder(pair, holdout, sampler, seed)
    arms = [candidate.policy for candidate in chosen if isinstance(candidate.policy, ChainPolicy)]
    runner.warm_up(arms)
    runs = _Runs(defaultdict(list), {})
    order = np.random.default_rng(seed)
    index_order = order.permutation(holdout.sequences).tolist()
    total = repeats * holdout.sequences
    for _ in range(repeats):
        before = runs.sequence_runs
        for index in index_order:
            # The sequence and the last slice of the profile need their time as well.
            late = time.monotonic() + runs.longest_s + slices.longest_s > deadline
            if late and runs.sequence_runs >= LEAST_SEQUENCES:
                break
            _run_sequence(runner, arms, index, order, runs)
            report("run", runs.sequence_runs, total)
        if runs.sequence_runs > before:
            cost = slices.measure()
        if runs.sequence_runs < before + holdout.sequences:
            break
        runs.complete_repeats += 1
    done = np.array(sorted({index for _, index in runs.seconds}))
    rows, autoregressive_s = _rows(holdout.select(done), chosen, cost, runs, done, seed)
    return {
        "kind": KIND,
        "version": VERSION,
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "shapes": {
            "target": describe(pair.target.config, pair.dtype),
            "drafter": describe(pair.draft.config, pair.dtype),
        },
        "trace": {key: trace.meta.get(key) for key in ("target", "drafter", "decoding", "depth")},
        "decoding": sampler.as_dict(),
        "context": context,
        "sequences": {"tuning": train.sequences, "holdout": holdout.sequences, "run": len(done)},
        "output_tokens": int(holdout.output_tokens[done].sum()),
        "done": {
            "minutes": None if minutes is None else float(minutes),
            "spent_minutes": (time.monotonic() - begun) / 60,
            "stopped_early": runs.sequence_runs < total,
            "repeats": runs.complete_repeats,
            "repeats_asked": repeats,
            "sequence_runs": runs.sequence_runs,
            "sequence_runs_asked": total,
        },
        "autoregressive_sequence_seconds": autoregressive_s.tolist(),
        "rows": sorted((row_document_without_text(row) for row in rows), key=lambda r: -r["measured"]["estimate"]),
        "median_abs_error_percent": float(np.median([abs(row.error_percent) for row in rows])),
        "best": _best(rows),
        "profile": slices.document,
        "provenance": provenance(pair.device, pair.dtype),
    }


class _Slices:
    """The cost profile, refined slice by slice."""

    def __init__(self, pair: Pair, trace: Trace, sampler: Sampler, seed: int, repeats: int, report: Progress):
        self.pair, self.depth, self.sampler, self.seed = pair, trace.depth, sampler, seed
        low, high = context_range(trace)
        self.contexts = sorted({int(c) for c in np.linspace(low, high, PROFILE_CONTEXTS).round()})
        self.report, self.total = report, (1 + repeats) * len(self.contexts)
        self.done = 0
        self.samples: Samples = defaultdict(list)
        self.document: dict[str, Any] = {}
        self.longest_s = 0.0

    def measure(self) -> ProfileCost:
        start, before = time.monotonic(), self.done
        self.document = profile(
            self.pair,
            contexts=self.contexts,
            depth=self.depth,
            repeats=SLICE_REPEATS,
            sampler=self.sampler,
            seed=self.seed,
            tree_tokens=0,
            samples=self.samples,
            progress=lambda done, _: self.report("profile", before + done, self.total),
        )
        self.done += len(self.contexts)
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        return profile_from_json(self.document, "just measured")


def _run_sequence(
    runner: ScriptedDecoder, policies: Sequence[ChainPolicy], index: int, order: np.random.Generator, runs: _Runs
) -> None:
    """Every policy once, and between them the baseline's sequence cut into as many bursts."""
    start, length = time.monotonic(), int(runner.trace.output_tokens[index])
    cuts = np.linspace(0, length, len(policies) + 1).round().astype(int).tolist()
    baseline_s = 0.0
    for burst, number in enumerate(order.permutation(len(policies)).tolist()):
        if cuts[burst] < cuts[burst + 1]:
            baseline_s += sum(r.seconds for r in runner.autoregressive(index, cuts[burst], cuts[burst + 1]))
        rounds = runner.speculative(index, policies[number])
        runs.seconds[number + 1, index].append(sum(r.seconds for r in rounds))
        runs.rounds[number + 1, index] = rounds
    runs.seconds[0, index].append(baseline_s)
    runs.sequence_runs += 1
    runs.longest_s = max(runs.longest_s, time.monotonic() - start)


def _rows(
    trace: Trace,
    chosen: Sequence[Candidate],
    cost: ProfileCost,
    runs: _Runs,
    done: npt.NDArray[np.int64],
    seed: int,
) -> tuple[list[Row], npt.NDArray[np.float64]]:
    """Predicted beside measured, over the sequences that were run, and the baseline's seconds."""

    def medians(arm: int) -> npt.NDArray[np.float64]:
        return np.array([np.median(runs.seconds[arm, index]) for index in done.tolist()])

    table, baseline_s = cost_table(trace, cost), medians(0)
    oracle_s = chain_oracle_seconds(trace, table)
    rows = []
    for number, candidate in enumerate(chosen, start=1):
        replayed = replay(trace, candidate.policy, table, seed=seed, log=True)
        decoded = [Decoded([], runs.rounds[number, index], 0.0) for index in done.tolist()]
        rows.append(
            Row(
                candidate=candidate,
                replayed=replayed,
                predicted=summarise(replayed, oracle_s),
                measured=ratio_interval(baseline_s, medians(number)),
                ladder=ladder(trace, candidate.policy, cost, seed=seed),
                speculative_s=medians(number),
                runs=decoded,
                measured_tau=float("nan"),
                overhead=float("nan"),
                measured_v_d=float("nan"),
                rounds_identical=rounds_identical(replayed, decoded),
                output_identical=float("nan"),
            )
        )
    return rows, baseline_s


# What is read off the emitted text, of which a scripted run has none.
WITHOUT_TEXT = (
    "output_identical_percent",
    "sequence_tokens",
    "measured_tau",
    "overhead",
    "acceleration_over_overhead",
    "acceleration_over_overhead_off_percent",
    "measured_v_d",
)


def row_document_without_text(row: Row) -> dict[str, Any]:
    """A row's JSON form; scripted runs have no output to compare."""
    document = row_document(row)
    return {k: v for k, v in document.items() if k not in WITHOUT_TEXT}


def _best(rows: Sequence[Row]) -> dict[str, Any]:
    predicted = max(rows, key=lambda row: row.predicted.speedup.estimate)
    measured = max(rows, key=lambda row: row.measured.estimate)
    return {
        "predicted": str(predicted.candidate.policy),
        "measured": str(measured.candidate.policy),
        "loss_percent": (1 - predicted.measured.estimate / measured.measured.estimate) * 100,
    }


def run_scripted(
    target: str,
    draft: str,
    trace: Trace,
    *,
    context: int = 0,
    policies: Sequence[ChainPolicy] | None = None,
    trials: int = 100,
    repeats: int = 3,
    device: str = "cuda",
    dtype: str = "bfloat16",
    smoke: bool = False,
    seed: int = 0,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`scripted_validation` of two named shapes, made with as many positions as the trace needs.

    The minutes cover making the models too.
    """
    begun = time.monotonic()
    positions = context_range(with_prefix(trace, context))[1] + trace.depth + 4
    pair = random_pair(target, draft, device=device, dtype=dtype, positions=positions, smoke=smoke, seed=seed)
    return scripted_validation(
        pair,
        trace,
        context=context,
        policies=policies,
        trials=trials,
        repeats=repeats,
        seed=seed,
        minutes=minutes,
        begun=begun,
        progress=progress,
    )
