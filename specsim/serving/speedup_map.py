"""Speedup by batch and context: the best draft length, and the batch beyond which speculation loses.

Batches are full: the next sequence takes the place of a finished sequence at once, and rounds of partly filled batches
are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from specsim.cost.batches import BatchCost, DoesNotFit
from specsim.cost.profile import NORMAL
from specsim.io.arrays import Array, Floats, Ints
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import Estimate, ratio_of_ratios, resample, tails
from specsim.serving.arrivals import shuffled
from specsim.serving.costs import known_error
from specsim.serving.draft_length import DraftLengthRule, schedule_ranges
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.trace.trace import Trace

TURNS = 4  # sequences that each place of a batch decodes, at least
REPEATS = 1000  # resamples of the sequences
SLACK = 1e-6  # batches by which interpolation may miss a whole number


@dataclass(frozen=True)
class Cell:
    """A batch at a context.

    context : tokens in every cache; None for those of the trace
    speedup : by label, over the same batch without speculation, with its interval of sequences and of the costs' error
    baseline_tokens_per_s : of the whole batch, without speculation
    """

    batch: int
    context: int | None
    speedup: dict[str, Estimate]
    baseline_tokens_per_s: float

    @property
    def best(self) -> str:
        """The label of the largest speedup."""
        return max(self.speedup, key=lambda label: self.speedup[label].estimate)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": self.best}


def _last(batch: float) -> int:
    """The largest whole batch at which speculation still gains. batch : the interpolated break-even"""
    return math.floor(batch + SLACK)


@dataclass(frozen=True)
class BreakEven:
    """The batch beyond which speculation loses, with its 95 % interval of sequences and of the costs' known error.

    Between the batches, the logarithm of the speedup is interpolated linearly in that of the batch. None if speculation
    still gains at the largest batch, 0 if it loses at every batch.

    choices : labels among which the best counts at every batch
    """

    context: int | None
    choices: tuple[str, ...]
    batch: float | None
    low: float | None
    high: float | None
    largest_batch: int

    def __str__(self) -> str:
        ends = [f"over {self.largest_batch}" if b is None else f"{_last(b)}" for b in (self.batch, self.low, self.high)]
        return ends[0] if len(set(ends)) == 1 else f"{ends[0]} [{ends[1]}, {ends[2]}]"

    @property
    def sentence(self) -> str:
        """Where speculation stops paying, in words."""
        if self.batch is None:
            low = "" if self.low is None else f" [loses beyond {_last(self.low)} to over {self.largest_batch}]"
            return f"fixed K still gains at a batch of {self.largest_batch}{low}"
        return f"fixed K loses beyond a batch of {self}" if self.batch else "fixed K loses at every batch"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SpeedupMap:
    """Speedups by batch and context.

    cells : by context, then batch, in the order given, up to the largest batch that fits into memory
    left_out : what of the batches does not fit, in words
    break_even : of the fixed draft lengths, each context's
    lengths : K of the fixed draft lengths, by label
    """

    batches: tuple[int, ...]
    contexts: tuple[int | None, ...]
    cells: tuple[Cell, ...]
    break_even: tuple[BreakEven, ...]
    lengths: dict[str, int]
    left_out: tuple[str, ...] = ()

    def schedule(self, context: int | None = None) -> dict[int, int]:
        """The best fixed K from each batch on where it changes, 0 where all lose; as `ScheduledK` takes it.

        Speculation ends at the batch beyond which it loses, which may lie between those of the table.
        """
        lengths: dict[int, int] = {}
        for cell in self.cells:
            if cell.context == context:
                k, most = 0, 1.0
                for label, length in self.lengths.items():
                    if cell.speedup[label].estimate > most:
                        k, most = length, cell.speedup[label].estimate
                if not lengths or lengths[max(lengths)] != k:
                    lengths[cell.batch if lengths else 1] = k
        for even in self.break_even:
            if even.context == context and even.batch and lengths[max(lengths)] == 0:
                lengths.pop(max(lengths))
                lengths[_last(even.batch) + 1] = 0
        return lengths

    def largest_batch(self, context: int | None = None) -> int:
        """The largest batch of the table at a context."""
        return max(cell.batch for cell in self.cells if cell.context == context)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "batches": list(self.batches),
            "contexts": list(self.contexts),
            "left_out": list(self.left_out),
            "cells": [cell.as_dict() for cell in self.cells],
            "break_even": [even.as_dict() for even in self.break_even],
            "schedules": [
                {"context": context, "ranges": schedule_ranges(self.schedule(context), self.largest_batch(context))}
                for context in self.contexts
            ]
            if self.lengths
            else [],
        }


def speedup_map(
    trace: Trace,
    cost: BatchCost,
    arms: Sequence[Policy | DraftLengthRule],
    batches: Sequence[int],
    *,
    contexts: Sequence[int | None] = (None,),
    seed: int = 0,
    progress: Counter = no_progress,
) -> SpeedupMap:
    """Speedup of each policy or rule at each batch and context.

    trace : recorded drafts
    cost : seconds of passes over batches
    arms : policies and rules to compare
    batches : increasing
    contexts : tokens in every sequence's cache; None for those of the trace
    seed : seed of the order of sequences and of the policies' random draws
    progress : called with (done, total) cells

    Intervals are over sequences, each round's seconds being shared evenly by the sequences in it, and hold the error of
    speedups with such costs where it is known.

    A context's table ends before the first batch that does not fit into memory.

    Raises InputError for batches that do not increase from 1 or more, policies that cannot be batched, and a context at
    which not even the first batch fits.
    """
    if not arms or not batches or batches[0] < 1 or any(a >= b for a, b in pairwise(batches)):
        raise InputError(f"batches {list(batches)}: give increasing ones from 1 on, such as 1,2,4,8")
    plain, drafts = drafts_of(trace, None), [drafts_of(trace, arm, seed=seed) for arm in arms]
    lengths = {str(arm): arm.k for arm in arms if isinstance(arm, FixedK)}
    cells: list[Cell] = []
    break_evens: list[BreakEven] = []
    left_out: list[str] = []
    for context in contexts:
        columns: list[Floats] = []  # [B, 1 + A, 2, S]: of the baseline and each arm, tokens and seconds
        errors: list[float] = []  # [B], of the logarithm of a speedup
        for batch in batches:
            order = _order(trace.sequences, batch, seed)
            try:
                full = partial(lockstep, cost=cost, batch=batch, order=order, refill=True, context=context)
                runs = [full(arm) for arm in (plain, *drafts)]
            except DoesNotFit as error:
                if not columns:
                    raise
                left_out.append(f"ends at batch {cells[-1].batch}: {str(error).partition(';')[0]}")
                break
            columns.append(np.array([run.per_sequence(full_only=True) for run in runs]))
            errors.append(known_error(cost, batch)[1])
            most = {run.label: float(run.rounds.emitted.mean()) for run in runs[1:]}
            cells.append(_cell(batch, context, most, columns[-1], errors[-1]))
            progress(len(cells), len(contexts) * len(batches))
        fixed = [i for i, arm in enumerate(arms) if isinstance(arm, FixedK)]
        if fixed:
            break_evens.append(
                break_even(
                    batches[: len(columns)],
                    np.array(columns)[:, [0, *(i + 1 for i in fixed)]],
                    context,
                    list(lengths),
                    errors,
                )
            )
    return SpeedupMap(tuple(batches), tuple(contexts), tuple(cells), tuple(break_evens), lengths, tuple(left_out))


def _order(sequences: int, batch: int, seed: int) -> Ints:
    """Sequences to decode, each equally often, TURNS or more of them in each place."""
    times = math.ceil(max(sequences, TURNS * batch) / sequences)
    return shuffled(sequences, times * sequences, np.random.default_rng(seed))


def _cell(batch: int, context: int | None, most: dict[str, float], columns: Floats, error: float) -> Cell:
    """Speedups of a batch. most : tokens per round by label, which no speedup exceeds"""
    (tokens, seconds), *others = columns

    def widened(value: Estimate, most: float) -> Estimate:
        """The interval with the costs' error in it."""
        if not error:
            return value
        low, high = (math.hypot(math.log(end / value), NORMAL * error) for end in (value.low, value.high))
        return Estimate(value.estimate, value * math.exp(-low), max(min(value * math.exp(high), most), value.estimate))

    speedup = {
        label: widened(ratio_of_ratios(arm_tokens, arm_s, tokens, seconds), most[label])
        for label, (arm_tokens, arm_s) in zip(most, others, strict=True)
    }
    return Cell(batch, context, speedup, float(tokens.sum() / seconds.sum()))


def break_even(
    batches: Sequence[int], columns: Floats, context: int | None, choices: Sequence[str], errors: Sequence[float]
) -> BreakEven:
    """Find the batch size beyond which the best of several choices is slower than decoding without speculation.

    columns : float [B, 1 + A, 2, S], tokens and seconds per sequence of the baseline, then of every choice
    errors : [B], standard deviations of the logarithm of speedups with such costs, which err alike at all batches
    """
    sequences = columns.shape[-1]
    index = resample(sequences, repeats=REPEATS, seed=0)
    weights = np.stack([np.bincount(row, minlength=sequences) for row in index])  # [REPEATS, S]

    def best(weight: Array) -> Floats:
        """The best speedup per batch [..., B] of sequences that count so often [..., S]."""
        sums = np.einsum("...s,baxs->...bax", weight, columns)
        rate = sums[..., 0] / sums[..., 1]
        return np.asarray((rate[..., 1:] / rate[..., :1]).max(axis=-1))

    estimate = _crossing(batches, best(np.ones(sequences)))
    off = np.random.default_rng(0).standard_normal((REPEATS, 1)) * np.array(errors)
    drawn = [_crossing(batches, row) for row in best(weights) * np.exp(off)]
    low, high = np.quantile(drawn, tails(sequences, 0.95), method="nearest")
    ends = [float(value) if math.isfinite(value) else None for value in (estimate, low, high)]
    return BreakEven(context, tuple(choices), ends[0], ends[1], ends[2], batches[-1])


def _crossing(batches: Sequence[int], speedups: Floats) -> float:
    """Where the speedup falls below 1 for good; infinite beyond the last batch, 0 before the first."""
    gains = np.flatnonzero(speedups >= 1)
    if not gains.size:
        return 0.0
    last = int(gains[-1])
    if last == len(batches) - 1:
        return math.inf
    above, below = math.log(speedups[last]), math.log(speedups[last + 1])
    near, far = math.log(batches[last]), math.log(batches[last + 1])
    return math.exp(near + (far - near) * above / (above - below))
