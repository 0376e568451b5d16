"""Scripted acceptance: true shapes with random weights, accepted and rejected as a trace says.

All compute is real: draft steps, copies to the host, policy decisions, target passes, caches.
Only the text is not: what is accepted, and what the policy sees of each drafted token, is
read from a dense trace, position by position, so that rounds are those of the replay. This
validates predicted time at the size of models whose weights are not at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.experiment.choice import choice_of
from realrun.experiment.document import forecasts_of, row_document
from realrun.experiment.error_parts import error_parts
from realrun.experiment.scripted.decoder import ScriptedDecoder, with_prefix
from realrun.experiment.settings import Candidate
from realrun.experiment.timing import Timings, check_repeats, wall_clock
from realrun.experiment.validate import Row, candidates, rounds_identical
from realrun.measure.profile import ProfileSlices, contexts_between
from realrun.pairs.pair import Pair
from realrun.pairs.random_pair import random_pair, vocabulary
from realrun.pairs.shapes import describe
from realrun.provenance import provenance
from specsim.cost.contexts import context_range
from specsim.cost.profile import ProfileCost
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.policy.chain.base import ChainPolicy
from specsim.replaying.chain_oracle import chain_oracle_seconds
from specsim.replaying.checks import check_replayable
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.prediction import ladder, summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.outcomes import as_recorded
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

KIND, VERSION = "specsim-scripted", 1
BASELINE = -1  # its number among the arms
MIN_SEQUENCES = 2  # run whatever the time, since an interval needs them


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
    policies : default: tuned on one half of the sequences, as in `realrun.experiment.validate`, and run on the other
    sampler : how tokens are chosen, default greedy; the trace's own mode does not matter here
    minutes : of profiling and running together. Sequences are run in random order, and none is
        begun that would not be done in that time; the first two are run whatever the time
    begun : on time.monotonic(), when the minutes begin, default now

    Every sequence is run by every policy in shuffled order, with a burst of the autoregressive
    baseline before each; together the bursts cover the sequence once. Every round is taken at the
    median of its repeats. The profile is taken in slices between the repeats, since machines drift.
    """
    begun = time.monotonic() if begun is None else begun
    deadline = np.inf if minutes is None else begun + 60 * minutes
    sampler, report = sampler or Sampler(), progress or (lambda what, done, total: None)
    check_repeats(repeats)
    if context < 0:
        raise InputError(f"context={context}; give 0 or more tokens")
    vocabulary(pair)
    trace = as_recorded(with_prefix(trace, context))  # runs take what was accepted from the trace
    for policy in policies or ():
        check_replayable(trace, policy)
        if policy.carries_state:  # sequences are run in random order, and not always all of them
            raise InputError(f"policy {policy} carries its state over sequences; let it start anew with each")
    slices = ProfileSlices(
        pair,
        contexts_between(*context_range(trace)),
        depth=trace.depth,
        sampler=sampler,
        seed=seed,
        slices=1 + repeats,
        progress=lambda done, total: report("profile", done, total),
    )
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
    pace = _Pace(deadline, slices)
    timings, order = Timings(), np.random.default_rng(seed)
    baseline = _Baseline(runner, timings)
    index_order = order.permutation(holdout.sequences).tolist()
    total, complete = repeats * holdout.sequences, 0

    for _ in range(repeats):
        before = pace.done
        for index in pace.within(index_order, lambda done: report("run", done, total)):
            for place, arm in enumerate(order.permutation(len(arms)).tolist()):
                baseline.burst(index, place, len(arms))  # together they cover the sequence once
                timings.add(arm, index, Decoded([], runner.speculative(index, arms[arm]), 0.0))
        if pace.done > before:
            cost = slices.measure()
        if pace.done < before + holdout.sequences:
            break
        complete += 1
    done = np.array(sorted(index for arm, index in timings.runs if arm == BASELINE))
    autoregressive_s = timings.seconds(BASELINE, done.tolist())
    rows = _rows(holdout.select(done), chosen, cost, timings, done.tolist(), autoregressive_s, seed)
    forecasts = forecasts_of(rows)
    return {
        "kind": KIND,
        "version": VERSION,
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "shapes": {
            "target": describe(pair.target.config, pair.dtype),
            "drafter": describe(pair.draft_config, pair.dtype),
        },
        "trace": {key: trace.meta.get(key) for key in ("target", "drafter", "decoding", "depth")},
        "decoding": sampler.as_dict(),
        "context": context,
        "sequences": {"tuning": train.sequences, "holdout": holdout.sequences, "run": len(done)},
        "output_tokens": int(holdout.output_tokens[done].sum()),
        "done": {
            "minutes": None if minutes is None else float(minutes),
            "spent_minutes": (time.monotonic() - begun) / 60,
            "stopped_early": pace.done < total,
            "repeats": complete,
            "repeats_asked": repeats,
            "sequence_runs": pace.done,
            "sequence_runs_asked": total,
        },
        "autoregressive_sequence_seconds": autoregressive_s.tolist(),
        "rows": sorted((row_document_without_text(row) for row in rows), key=lambda r: -r["measured"]["estimate"]),
        "median_abs_error_percent": float(np.median([abs(row.error_percent) for row in rows])),
        "choice": choice_of(forecasts, autoregressive_s, 0.0) if forecasts else None,
        "profile": slices.document,
        "provenance": provenance(pair.device, pair.number_type),
    }


class _Pace:
    """Sequences one by one as long as there is time; the first two whatever the time."""

    def __init__(self, deadline: float, slices: ProfileSlices):
        self.deadline, self.slices = deadline, slices
        self.done, self.longest_s = 0, 0.0

    def within(self, sequences: Iterable[int], report: Callable[[int], None]) -> Iterator[int]:
        for sequence in sequences:
            start = time.monotonic()
            # The sequence and the last slice of the profile need their time as well.
            late = start + self.longest_s + self.slices.longest_s > self.deadline
            if late and self.done >= MIN_SEQUENCES:
                return
            yield sequence
            self.done += 1
            self.longest_s = max(self.longest_s, time.monotonic() - start)
            report(self.done)


class _Baseline:
    """The autoregressive runs, each cut into as many bursts as there are turns."""

    def __init__(self, runner: ScriptedDecoder, timings: Timings):
        self.runner, self.timings = runner, timings
        self.rounds: list[Round] = []

    def burst(self, sequence: int, place: int, places: int) -> None:
        length = int(self.runner.trace.output_tokens[sequence])
        cuts = np.linspace(0, length, places + 1).round().astype(int).tolist()
        if place == 0:
            self.rounds = []
        if cuts[place] < cuts[place + 1]:
            self.rounds += self.runner.autoregressive(sequence, cuts[place], cuts[place + 1])
        if place == places - 1:
            self.timings.add(BASELINE, sequence, Decoded([], self.rounds, 0.0))


def _rows(
    trace: Trace,
    chosen: Sequence[Candidate],
    cost: ProfileCost,
    timings: Timings,
    done: Sequence[int],
    baseline_s: Floats,
    seed: int,
) -> list[Row]:
    """Predicted beside measured, over the sequences that were run."""
    priced = PricedTrace(trace, cost)
    oracle_s = chain_oracle_seconds(trace, priced.table())
    rows = []
    for arm, candidate in enumerate(chosen):
        replayed = priced.replay(candidate.policy, seed=seed, log=True)
        decoded, spent_s = timings.last_runs(arm, done), timings.seconds(arm, done)
        measured = ratio_interval(baseline_s, spent_s)
        rows.append(
            Row(
                candidate=candidate,
                replayed=replayed,
                predicted=summarise(replayed, oracle_s),
                unseen=replayed.speedup,  # whose costs come from probes alone
                measured=measured,
                wall_clock=wall_clock(timings.wall_s(BASELINE, done), timings.wall_s(arm, done), measured, 0.0),
                ladder=ladder(trace, candidate.policy, cost, seed=seed),
                error_parts=error_parts(priced, replayed, [timings.rounds(arm, index) for index in done]),
                speculative_s=spent_s,
                runs=decoded,
                measured_tau=float("nan"),
                overhead=float("nan"),
                measured_v_d=float("nan"),
                rounds_identical=rounds_identical(replayed, decoded),
                output_identical=float("nan"),
                divergences=[],
            )
        )
    return rows


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
