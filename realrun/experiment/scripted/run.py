"""Scripted acceptance: true shapes with random weights, accepted and rejected as a trace says.

All compute is real: draft steps, copies to the host, policy decisions, target passes, caches.
Only the text is not: what is accepted, and what the policy sees of each drafted token, is
read from a dense trace, position by position, so that rounds are those of the replay. This
validates predicted time at the size of models whose weights are not at hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.decode.sampling import Sampler
from realrun.experiment.choice import choice_of
from realrun.experiment.document import forecasts_of, row_document
from realrun.experiment.scripted.decoder import ScriptedDecoder, with_prefix
from realrun.experiment.settings import Candidate
from realrun.experiment.timing import Timings, check_repeats, wall_clock
from realrun.experiment.validate import Row, candidates, rounds_identical
from realrun.measure.profile import ProfileSlices, contexts_between
from realrun.pairs.pair import Pair
from realrun.pairs.random_pair import random_pair, vocabulary
from realrun.pairs.shapes import describe
from realrun.provenance import provenance
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.learn.settings import SearchSettings
from specsim.policy.chain.base import ChainPolicy
from specsim.replaying.checks import check_replayable
from specsim.replaying.intervals import ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.trace.outcomes import as_recorded
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

KIND, VERSION = "specsim-scripted", 1
BASELINE = -1  # its number among the arms
MIN_SEQUENCES = 2  # run whatever the time, since an interval needs them


@dataclass(frozen=True)
class ScriptedSettings:
    """How to tune and run.

    context : tokens of random text put before every prompt, so that long contexts can be validated
    policies : default: tuned on one half of the sequences, as in `realrun.experiment.validate`, and run on the other
    sampler : how tokens are chosen; the trace's own mode does not matter here
    minutes : of profiling and running together. Sequences are run in random order, and no sequence is
        begun that would not be done in that time; the first two are run whatever the time
    """

    context: int = 0
    policies: Sequence[ChainPolicy] | None = None
    trials: int = 100
    repeats: int = 3
    sampler: Sampler = Sampler()
    seed: int = 0
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if self.context < 0:
            raise InputError(f"context={self.context}; give 0 or more tokens")


def scripted_validation(
    pair: Pair,
    trace: Trace,
    settings: ScriptedSettings,
    progress: Progress = lambda what, done, total: None,
    begun: float | None = None,
) -> dict[str, Any]:
    """Predict and really run the trace's rounds on this pair; the result as a JSON document.

    begun : on time.monotonic(), when the minutes begin, default now

    Every sequence is run by every policy in shuffled order, with a burst of the autoregressive
    baseline before each; together the bursts cover the sequence once. Every round is taken at the
    median of its repeats. The profile is taken in slices between the repeats, since machines drift.
    """
    begun = time.monotonic() if begun is None else begun
    deadline = np.inf if settings.minutes is None else begun + 60 * settings.minutes
    seed, repeats = settings.seed, settings.repeats
    vocabulary(pair)
    trace = as_recorded(with_prefix(trace, settings.context))  # runs take what was accepted from the trace
    for policy in settings.policies or ():
        check_replayable(trace, policy)
        if policy.carries_state:  # sequences are run in random order, and not always all of them
            raise InputError(f"policy {policy} carries its state over sequences; let it start anew with each")
    slices = ProfileSlices(
        pair,
        1 + repeats,
        lambda done, total: progress("profile", done, total),
        contexts=contexts_between(*context_range(trace)),
        depth=trace.depth,
        sampler=settings.sampler,
        seed=seed,
    )
    cost = slices.measure()
    if settings.policies is None:
        tuning, held = split_sequences(trace, seed=seed)
        train, holdout = trace.select(tuning), trace.select(held)
        chosen, _ = candidates(train, cost, SearchSettings(trials=settings.trials, seed=seed), progress=progress)
    else:
        train, holdout = trace.select([]), trace
        chosen = [Candidate(policy, "given") for policy in settings.policies]
    runner = ScriptedDecoder(pair, holdout, settings.sampler, seed)
    pace, timings = _Pace(deadline, slices), Timings()
    complete = _run_repeats(runner, chosen, pace, timings, settings, progress)
    cost = profile_from_json(slices.document, "just measured")
    done = np.array(sorted(index for arm, index in timings.runs if arm == BASELINE))
    autoregressive_s = timings.seconds(BASELINE, done.tolist())
    rows = _rows(holdout.select(done), chosen, cost, timings, done.tolist(), seed)
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
        "decoding": settings.sampler.as_dict(),
        "context": settings.context,
        "sequences": {"tuning": train.sequences, "holdout": holdout.sequences, "run": len(done)},
        "output_tokens": int(holdout.output_tokens[done].sum()),
        "done": {
            "minutes": None if settings.minutes is None else float(settings.minutes),
            "spent_minutes": (time.monotonic() - begun) / 60,
            "stopped_early": pace.done < repeats * holdout.sequences,
            "repeats": complete,
            "repeats_asked": repeats,
            "sequence_runs": pace.done,
            "sequence_runs_asked": repeats * holdout.sequences,
        },
        "autoregressive_sequence_seconds": autoregressive_s.tolist(),
        "rows": sorted((row_document(row, seed) for row in rows), key=lambda r: -r["measured"]["estimate"]),
        "median_abs_error_percent": float(np.median([abs(row.error_percent) for row in rows])),
        "choice": choice_of(forecasts, autoregressive_s, 0.0) if forecasts else None,
        "profile": slices.document,
        "provenance": provenance(pair.device, pair.number_type),
    }


def _run_repeats(
    runner: ScriptedDecoder,
    chosen: Sequence[Candidate],
    pace: _Pace,
    timings: Timings,
    settings: ScriptedSettings,
    progress: Progress,
) -> int:
    """Run all sequences in repeats while there is time, with a slice of costs after each; count complete repeats."""
    arms = [candidate.policy for candidate in chosen if isinstance(candidate.policy, ChainPolicy)]
    runner.warm_up(arms)
    sequences, order = runner.trace.sequences, np.random.default_rng(settings.seed)
    baseline, index_order = _Baseline(runner, timings), order.permutation(sequences).tolist()
    for repeat in range(settings.repeats):
        before = pace.done
        for index in pace.within(index_order, lambda done: progress("run", done, settings.repeats * sequences)):
            for place, arm in enumerate(order.permutation(len(arms)).tolist()):
                baseline.burst(index, place, len(arms))  # together they cover the sequence once
                timings.add(arm, index, Decoded([], runner.speculative(index, arms[arm]), 0.0))
        if pace.done > before:
            pace.slices.measure()
        if pace.done < before + sequences:
            return repeat
    return settings.repeats


class _Pace:
    """Yields sequences as long as there is time; the first two whatever the time."""

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
    trace: Trace, chosen: Sequence[Candidate], cost: ProfileCost, timings: Timings, done: Sequence[int], seed: int
) -> list[Row]:
    """Predicted beside measured, over the sequences that were run."""
    priced, baseline_s = PricedTrace(trace, cost), timings.seconds(BASELINE, done)
    oracle_s = chain_oracle_seconds(trace, priced.table())
    rows = []
    for arm, candidate in enumerate(chosen):
        replayed = priced.replay(candidate.policy, seed=seed, log=True)
        decoded, own_s = timings.last_runs(arm, done), timings.seconds(arm, done)
        measured = ratio_interval(baseline_s, own_s)
        rows.append(
            Row(
                candidate=candidate,
                priced=priced,
                replayed=replayed,
                predicted=summarise(replayed, oracle_s),
                measured=measured,
                wall_clock=wall_clock(timings.wall_s(BASELINE, done), timings.wall_s(arm, done), measured, 0.0),
                speculative_s=own_s,
                rounds=[timings.rounds(arm, index) for index in done],
                runs=decoded,
                rounds_identical=rounds_identical(replayed, decoded),
            )
        )
    return rows


def run_scripted(
    target: str,
    draft: str,
    trace: Trace,
    settings: ScriptedSettings,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    smoke: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """`scripted_validation` of two named shapes, made with as many positions as the trace needs.

    The minutes cover making the models too.
    """
    begun = time.monotonic()
    positions = context_range(with_prefix(trace, settings.context))[1] + trace.depth + 4
    pair = random_pair(target, draft, device=device, dtype=dtype, positions=positions, smoke=smoke, seed=settings.seed)
    return scripted_validation(pair, trace, settings, progress, begun)
