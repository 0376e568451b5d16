"""Sequences decoded in lockstep: a round of the batch is one of each, and waits for its longest draft."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.arrays import Bools, Floats, Ints
from specsim.cost.batches import BatchCost
from specsim.errors import InputError
from specsim.serving.costs import RoundSeconds, round_seconds
from specsim.serving.drafts import Drafts, KnownDrafts, RuleDrafts, tokens_behind
from specsim.trace.trace import Trace


class BatchRounds(NamedTuple):
    """Rounds of the sequences of batches, one array [R] per fact, those of one sequence in order.

    batch_round : the round of a batch that each is part of, from 0 on
    sequence : index in the trace; t : output position at which the round starts
    drafted, accepted, emitted : tokens
    behind : tokens beside the pending one that the drafter takes in first
    speculates : whether K was above 0
    """

    batch_round: Ints
    sequence: Ints
    t: Ints
    drafted: Ints
    accepted: Ints
    emitted: Ints
    behind: Ints
    speculates: Bools


@dataclass(frozen=True, eq=False)
class Lockstep:
    """A trace decoded in batches.

    Parameters
    ----------
    label : str
        Of the policy or rule.
    batch : int
        Sequences of a full batch.
    rounds : BatchRounds
        What every sequence did.
    cached : int [R]
        Tokens in the cache of each of them.
    seconds : RoundSeconds
        Of every round of a batch [Q].
    sequences : int
        Of the trace.
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

    Parameters
    ----------
    drafts : Drafts
        What every sequence drafts, see `drafts_of`.
    cost : BatchCost
        Of passes over batches.
    batch : int
        Sequences that start together.
    order : int [M], optional
        Sequences of the trace in the order in which they are taken, each as often as it is named; all of them once.
    refill : bool
        Whether the place of a sequence that is over is taken by the next one at once. Otherwise the batch shrinks,
        and the next one starts when all are over.
    context : int, optional
        Tokens in every sequence's cache, in place of those of the trace.

    Returns
    -------
    Lockstep

    Raises
    ------
    InputError
        For a batch below 1, a negative context, or no sequence.
    """
    taken = np.arange(drafts.trace.sequences) if order is None else np.asarray(order, dtype=np.int64)
    if batch < 1 or taken.size == 0 or (context is not None and context < 0):
        raise InputError(f"batch={batch}, {taken.size} sequences, context={context}; give at least 1, 1 and 0")
    if isinstance(drafts, KnownDrafts):
        rounds = _of_known(drafts, taken, batch, refill)
    else:
        rounds = _of_rule(drafts, taken, batch, refill, context)
    cached = cached_tokens(drafts.trace, rounds.sequence, rounds.t, context)
    seconds = round_seconds(
        cost, rounds.batch_round, rounds.drafted, rounds.behind, cached, rounds.speculates, drafts.tree
    )
    return Lockstep(drafts.label, batch, rounds, cached, seconds, drafts.trace.sequences)


def cached_tokens(trace: Trace, sequence: Ints, t: Ints, context: int | None = None) -> Ints:
    """Tokens in the cache before a round at output position t, the pending one left out."""
    if context is not None:
        return np.full(sequence.shape, context, dtype=np.int64)
    return np.asarray(trace.prompt_tokens[sequence] - 1 + t, dtype=np.int64)


def _of_known(drafts: KnownDrafts, order: Ints, batch: int, refill: bool) -> BatchRounds:
    """The rounds are known before; what is left is in which round of the batch each sequence starts."""
    counts = drafts.num_rounds[order]
    first = _first_rounds(counts, batch, refill)
    starts = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    row = np.repeat(drafts.offsets[order], counts) + within
    return BatchRounds(
        batch_round=np.repeat(first, counts) + within,
        sequence=np.repeat(order, counts),
        t=drafts.t[row],
        drafted=drafts.drafted[row],
        accepted=drafts.accepted[row],
        emitted=drafts.emitted[row],
        behind=drafts.behind[row],
        speculates=np.full(len(row), drafts.speculates),
    )


def _first_rounds(counts: Ints, batch: int, refill: bool) -> Ints:
    """The batch's round in which each sequence starts [M], of how many rounds it takes [M]."""
    if not refill:
        longest = np.maximum.reduceat(counts, np.arange(0, len(counts), batch))
        return np.repeat(np.cumsum(longest) - longest, batch)[: len(counts)]
    free = [0] * batch  # the round from which on each place is free
    first = np.empty_like(counts)
    for i, count in enumerate(counts.tolist()):
        first[i] = free[0]
        heapq.heapreplace(free, free[0] + count)
    return first


def _of_rule(drafts: RuleDrafts, order: Ints, batch: int, refill: bool, context: int | None) -> BatchRounds:
    """Round by round, as the rule has to see the load."""
    trace, rule = drafts.trace, drafts.rule
    state = rule.initial_state()
    place, end = (np.asarray(trace.offsets[i], dtype=np.int64) for i in (order, order + 1))
    behind = np.zeros(len(order), dtype=np.int64)
    running, waiting = np.empty(0, dtype=np.int64), 0
    columns: list[tuple[npt.ArrayLike, ...]] = []
    while running.size or waiting < len(order):
        if refill or not running.size:
            taken = min(batch - running.size, len(order) - waiting)
            running = np.concatenate([running, np.arange(waiting, waiting + taken)])
            waiting += taken
        sequence, at = order[running], place[running]
        t = at - trace.offsets[sequence]
        k = rule.choose(state, len(running), int(cached_tokens(trace, sequence, t, context).sum()))
        drafted, accepted = drafts.draft(k, sequence, at)
        emitted = np.minimum(accepted + 1, end[running] - at)
        state = rule.update(state, drafted, accepted)
        number, speculates = np.full(len(running), len(columns)), np.full(len(running), k > 0)
        columns.append((running, number, sequence, t, drafted, accepted, emitted, behind[running], speculates))
        behind[running] = tokens_behind(behind[running], drafted, accepted, k)
        place[running] += emitted
        running = running[place[running] < end[running]]
    entry, *facts = (np.concatenate(column) for column in zip(*columns, strict=True))
    by_sequence = np.argsort(entry, kind="stable")
    return BatchRounds(*(fact[by_sequence] for fact in facts))
