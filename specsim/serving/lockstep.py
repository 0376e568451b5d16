"""Sequences decoded in lockstep: every round of the batch waits for its longest draft."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost
from specsim.io.arrays import Bools, Floats, Ints
from specsim.io.errors import InputError
from specsim.serving.costs import RoundSeconds, round_seconds
from specsim.serving.draft_length import Running
from specsim.serving.drafts import Drafts
from specsim.trace.trace import Trace


class BatchRounds(NamedTuple):
    """Rounds of the sequences of batches, an array [R] per field, the rounds of a sequence in order.

    batch_round : round of the batch, from 0 on
    sequence : index in the trace; t : output position at which the round starts
    drafted, verified, accepted, emitted : tokens
    behind : tokens besides the pending token that the drafter takes in first
    speculates : whether K was above 0
    """

    batch_round: Ints
    sequence: Ints
    t: Ints
    drafted: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints
    behind: Ints
    speculates: Bools


@dataclass(frozen=True, eq=False)
class Lockstep:
    """A trace decoded in batches.

    label : of the policy or rule
    batch : sequences of a full batch
    rounds : rounds of every sequence
    cached : int [R], tokens in the cache before each round
    seconds : seconds of every round of a batch [Q]
    sequences : of the trace
    """

    label: str
    batch: int
    rounds: BatchRounds
    cached: Ints
    seconds: RoundSeconds
    sequences: int

    @property
    def total_s(self) -> float:
        return float(self.seconds.total_s.sum())

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all sequences."""
        return int(self.rounds.emitted.sum()) / self.total_s

    @property
    def mean_batch(self) -> float:
        """Sequences in a batch, averaged over time."""
        return float(np.average(self.seconds.sequences, weights=self.seconds.total_s))

    def per_sequence(self, *, full_only: bool = False) -> tuple[Floats, Floats]:
        """Output tokens and seconds [S]; every round's seconds are shared evenly by the sequences in it.

        full_only : of rounds alone in which the batch is full
        """
        rounds, seconds = self.rounds, self.seconds
        counted = seconds.sequences == self.batch if full_only else np.ones(len(seconds.sequences), dtype=np.bool_)
        share_s = np.where(counted, seconds.total_s / seconds.sequences, 0.0)[rounds.batch_round]
        tokens = rounds.emitted * counted[rounds.batch_round]

        def summed(values: npt.ArrayLike) -> Floats:
            return np.bincount(rounds.sequence, values, minlength=self.sequences).astype(np.float64)

        return summed(tokens), summed(share_s)

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: plain numbers, units as in the names."""
        total_s = self.seconds.total_s
        return {
            "policy": self.label,
            "batch": self.batch,
            "rounds": len(total_s),
            "drafted": int(self.rounds.drafted.sum()),
            "verified": int(self.rounds.verified.sum()),
            "accepted": int(self.rounds.accepted.sum()),
            "output_tokens": int(self.rounds.emitted.sum()),
            "seconds": self.total_s,
            "draft_s": float(self.seconds.draft_s.sum()),
            "verify_s": float(self.seconds.verify_s.sum()),
            "other_s": float(self.seconds.other_s.sum()),
            "tokens_per_s": self.tokens_per_s,
            "mean_batch": self.mean_batch,
        }


def lockstep(
    drafts: Drafts,
    cost: BatchCost,
    batch: int,
    *,
    order: Sequence[int] | Ints | None = None,
    refill: bool = False,
    context: int | None = None,
) -> Lockstep:
    """Decode sequences of a trace together.

    drafts : what every sequence drafts, see `drafts_of`
    cost : of passes over batches
    batch : sequences that start together
    order : int [M], sequences of the trace in the order in which they start, with repetitions; default: each once
    refill : whether the next sequence takes the place of a finished sequence at once. Otherwise the batch shrinks, and
        the next batch starts when all have finished
    context : tokens in every sequence's cache, in place of those of the trace

    Raises InputError for a batch below 1, a negative context, or no sequence.
    """
    taken = np.arange(drafts.trace.sequences) if order is None else np.asarray(order, dtype=np.int64)
    if batch < 1 or taken.size == 0 or (context is not None and context < 0):
        raise InputError(f"batch={batch}, {taken.size} sequences, context={context}; give at least 1, 1 and 0")
    if drafts.rows is None:
        rounds = _follow_load(drafts, taken, batch, refill, context)
    else:
        rounds = _known_ahead(drafts, drafts.rows, taken, batch, refill)
    cached = cached_tokens(drafts.trace, rounds.sequence, rounds.t, context)
    seconds = round_seconds(
        cost,
        rounds.batch_round,
        rounds.drafted,
        rounds.behind,
        cached,
        rounds.speculates,
        drafts.tree,
        rounds.verified,
        masks=drafts.masks,
    )
    return Lockstep(drafts.label, batch, rounds, cached, seconds, drafts.trace.sequences)


def cached_tokens(trace: Trace, sequence: Ints, t: Ints, context: int | None = None) -> Ints:
    """Tokens in the cache before a round at output position t, the pending token left out."""
    if context is not None:
        return np.full(sequence.shape, context, dtype=np.int64)
    return np.asarray(trace.prompt_tokens[sequence] - 1 + t, dtype=np.int64)


def _known_ahead(drafts: Drafts, rows: Ints, order: Ints, batch: int, refill: bool) -> BatchRounds:
    """Place rounds that are known ahead, by the round of the batch in which each sequence starts.

    rows : row of the trace at which each round starts, sequence by sequence
    """
    trace, k = drafts.trace, drafts.rule.max_draft_tokens
    own = np.searchsorted(trace.offsets, rows, side="right") - 1  # sequence of each round
    num_rounds = np.bincount(own, minlength=trace.sequences)
    offsets = np.append(0, num_rounds.cumsum())
    drafted, accepted = drafts.draft(k, own, rows)
    behind = np.append(0, drafts.behind_after(rows, np.zeros_like(rows), drafted, accepted, k))[:-1]
    behind[np.isin(rows, trace.offsets)] = 0
    counts = num_rounds[order]
    first = _first_rounds(counts, batch, refill)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.repeat(offsets[order], counts) + within
    return BatchRounds(
        batch_round=np.repeat(first, counts) + within,
        sequence=np.repeat(order, counts),
        t=(rows - trace.offsets[own])[index],
        drafted=drafted[index],
        verified=drafted[index],
        accepted=accepted[index],
        emitted=np.diff(rows, append=len(trace.token))[index],
        behind=behind[index],
        speculates=np.full(len(index), k > 0),
    )


def _first_rounds(counts: Ints, batch: int, refill: bool) -> Ints:
    """Round of the batch in which each sequence starts [M], by the number of its rounds [M]."""
    if not refill:
        longest = np.maximum.reduceat(counts, np.arange(0, len(counts), batch))
        return np.repeat(np.cumsum(longest) - longest, batch)[: len(counts)]
    free = [0] * batch  # the round from which on each place is free
    first = np.empty_like(counts)
    for i, count in enumerate(counts.tolist()):
        first[i] = free[0]
        heapq.heapreplace(free, free[0] + count)
    return first


def _follow_load(drafts: Drafts, order: Ints, batch: int, refill: bool, context: int | None) -> BatchRounds:
    """Decode round by round, because the rule has to see the load."""
    trace, rule = drafts.trace, drafts.rule
    state = rule.initial_state()
    row = np.asarray(trace.offsets[order], dtype=np.int64)
    left = np.asarray(trace.output_tokens[order], dtype=np.int64)
    behind, verified, accepted = np.zeros((3, len(order)), dtype=np.int64)
    running, waiting = np.empty(0, dtype=np.int64), 0
    columns: list[tuple[npt.ArrayLike, ...]] = []
    while running.size or waiting < len(order):
        if refill or not running.size:
            started = min(batch - running.size, len(order) - waiting)
            running = np.concatenate([running, np.arange(waiting, waiting + started)])
            waiting += started
        sequence, start, before = order[running], row[running], behind[running]
        t = start - trace.offsets[sequence]
        cached = cached_tokens(trace, sequence, t, context)
        known = Running(running, cached, left[running], verified[running], accepted[running], before, len(running))
        turn = drafts.decode(state, known, sequence, start)
        state = rule.update(state, known, turn)
        number, speculates = np.full(len(running), len(columns)), np.full(len(running), turn.speculates)
        columns.append((running, number, sequence, t, *turn[:4], before, speculates))
        row[running], behind[running] = turn.row, turn.behind
        verified[running] += turn.verified
        accepted[running] += turn.accepted
        left[running] -= turn.emitted
        running = running[left[running] > 0]
    entry, *fields = (np.concatenate(column) for column in zip(*columns, strict=True))
    by_sequence = np.argsort(entry, kind="stable")
    return BatchRounds(*(field[by_sequence] for field in fields))
