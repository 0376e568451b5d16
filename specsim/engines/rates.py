"""Counts from the numbers that engines print: rates with three decimals, sums of drafts of different lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import MOST_COUNT, MOST_DRAFTED, Counters
from specsim.io.arrays import Ints
from specsim.io.errors import InputError

MOST_SHORT = 0.05  # of rounds: the most by which rates by position may be wrong for drafts that end early
ROUNDING = 1e-9
MOST_TRIED = 1000  # numbers of rounds that a printed mean is compared with


class Printed(NamedTuple):
    """A number as printed: it lies within half a unit of the last place."""

    value: float
    half: float

    @staticmethod
    def of(text: str) -> Printed:
        return Printed(float(text), 0.5 * 10.0 ** -len(text.strip().partition(".")[2]))

    def holds(self, value: float) -> bool:
        return abs(self.value - value) <= self.half + ROUNDING


class Counted(NamedTuple):
    """Counts by position, and the possible error of a count in tokens."""

    accepted: Ints
    off_by: int


def counts_of_rates(rates: Sequence[Printed], rounds: int, accepted: int) -> Counted | None:
    """Integer acceptance counts per position consistent with the printed rates and the total, or None."""
    if not all(rate.value <= 1 + rate.half for rate in rates):
        return None
    low = np.array([math.ceil((rate.value - rate.half - ROUNDING) * rounds) for rate in rates], dtype=np.int64)
    high = np.array([math.floor((rate.value + rate.half + ROUNDING) * rounds) for rate in rates], dtype=np.int64)
    high = np.minimum.accumulate(np.minimum(high, rounds))  # they do not grow with the position
    low = np.maximum.accumulate(np.maximum(low, 0)[::-1])[::-1]
    room = int(high.sum() - low.sum())
    missing = accepted - int(low.sum())
    if (low > high).any() or not 0 <= missing <= room:
        return None
    if not room:
        return Counted(low, 0)
    # Between two sequences that do not grow, at the same share of the way, lies another.
    counts = low + (high - low) * missing // room
    for i in np.flatnonzero(counts < high)[: accepted - int(counts.sum())]:
        counts[i] += 1
    return Counted(counts, 0 if missing in (0, room) else int((high - low).max()))


class Part(NamedTuple):
    """Counts of a line: rounds, drafted tokens, accepted by position, and the possible error of the rounds."""

    rounds: int
    drafted: int
    counted: Counted
    rounds_off_by: int


def part_of(mean_length: Printed, rates: Sequence[Printed], drafted: int, accepted: int) -> Part | None:
    """Find the number of rounds, and the counts, of a printed line; None if no number fits what is printed.

    Of several numbers that fit it takes the smallest, because the drafts are then most equal in length.

    mean_length : 1 + accepted / rounds, as printed
    rates : share of all rounds that accepted the token at each position, as printed
    """
    least = max(1, -(-drafted // len(rates)))
    above, half = mean_length.value - 1, mean_length.half + ROUNDING
    most = drafted
    if accepted and above > half:
        most = min(most, math.floor(accepted / (above - half)))
    if accepted:
        least = max(least, math.ceil(accepted / (above + half)) if above + half > 0 else most + 1)
    for rounds in range(least, min(most, least + MOST_TRIED) + 1):
        counted = counts_of_rates(rates, rounds, accepted)
        if counted is not None and mean_length.holds(1 + accepted / rounds):
            exact = rounds * len(rates) == drafted
            return Part(rounds, drafted, counted, 0 if exact else most - rounds)
    return None


def sum_of_parts(parts: Sequence[Part], instead: str) -> tuple[Counters, list[str]]:
    """Counters of consecutive lines, which may be of several draft lengths, and notes on them."""
    by_depth = {depth: [part for part in parts if len(part.counted.accepted) == depth] for depth in depths_of(parts)}
    notes: list[str] = []
    summed: list[Counters] = []
    for depth, same in by_depth.items():
        rounds, drafted = sum(part.rounds for part in same), sum(part.drafted for part in same)
        accepted = np.sum([part.counted.accepted for part in same], axis=0)
        counted, own = counters(rounds, drafted, accepted.tolist(), instead)
        summed.append(counted)
        if len(by_depth) > 1:
            notes.append(f"K = {depth}: {rounds:,} rounds, acceptance length {1 + accepted.sum() / rounds:.2f}")
        notes += own
    tokens_off_by, rounds_off_by = sum(part.counted.off_by for part in parts), sum(part.rounds_off_by for part in parts)
    if tokens_off_by or rounds_off_by:
        notes.append(
            f"counts follow from rounded rates: off by at most {tokens_off_by:,} tokens of a position"
            + f", and by {rounds_off_by:,} rounds" * (rounds_off_by > 0)
        )
    windows = (Counters(np.full(len(part.counted.accepted), part.rounds), part.counted.accepted) for part in parts)
    return replace(_added(summed), windows=tuple(windows) if len(by_depth) == 1 < len(parts) else ()), notes


def depths_of(parts: Sequence[Part]) -> list[int]:
    """The draft lengths that lines have, ascending."""
    return sorted({len(part.counted.accepted) for part in parts})


def _added(summed: Sequence[Counters]) -> Counters:
    """Counters of drafts of several lengths: a position counts the rounds that drafted it."""
    depth = max(len(counted.drafted) for counted in summed)
    columns = np.zeros((2, depth), dtype=np.int64)
    for counted in summed:
        columns[:, : len(counted.drafted)] += counted.drafted, counted.accepted
    tokens = [counted.drafted_tokens for counted in summed]
    if all(each is None for each in tokens):
        return Counters(columns[0], columns[1])
    total = sum(int(each.drafted.sum()) if each.drafted_tokens is None else each.drafted_tokens for each in summed)
    return Counters(np.full(depth, columns[0, 0]), columns[1], drafted_tokens=total)


def counters_of_histogram(times: Ints, drafted: int, instead: str) -> tuple[Counters, list[str]]:
    """Counters of rounds by their accepted tokens [D + 1], see `counters`."""
    at_least = times[::-1].cumsum()[::-1]  # rounds that accepted i tokens or more
    return counters(int(at_least[0]), drafted, at_least[1:].tolist(), instead)


def counters(
    rounds: int, drafted: int, accepted: Sequence[int], instead: str, most_off: float = MOST_SHORT
) -> tuple[Counters, list[str]]:
    """Counters by position from the total of drafted tokens, and notes on them.

    If drafts differ in length, it is unknown which rounds drafted an i-th token. A few drafts that end early, at the
    limit on output tokens, change little. Where rates by position could be wrong by more than `most_off`, as for
    n-grams and under a schedule of K, counters are of all rounds: see `Counters.drafted_tokens`.

    instead : what to import for the rates of the rounds that drafted so far
    """
    if not 0 < rounds <= drafted <= MOST_COUNT or sum(accepted) > drafted:
        raise InputError(f"{drafted} tokens in {rounds} drafts, {sum(accepted)} accepted, are impossible; export again")
    depth = max(len(accepted), -(-drafted // rounds))
    if depth > MOST_DRAFTED:
        raise InputError(f"drafts of {depth} tokens are impossible; export again")
    passed = np.zeros(depth, dtype=np.int64)
    passed[: len(accepted)] = accepted
    if (np.diff(passed) > 0).any() or passed[0] > rounds or passed[-1] < 0:
        raise InputError("counts by position grow with the position, or exceed the drafts; export them together")
    short = rounds * depth - drafted
    off = short * max(1 - 2 / depth, 0.0) / rounds  # were all of it missing from the last position; of two it is
    if off > most_off:
        note = (
            f"drafts differ in length ({drafted:,} tokens in {rounds:,} drafts of up to {depth}): a K stands for these "
            f"drafts cut at K, of which more may be accepted if all reach K; to tell them apart, {instead}"
        )
        return Counters(np.full(depth, rounds), passed, drafted_tokens=drafted), [note]
    weight = np.arange(depth, dtype=np.int64)
    missing = short * weight // max(int(weight.sum()), 1)
    missing[-1] += short - int(missing.sum())
    counted = np.maximum(rounds - missing, passed)
    notes = []
    if off:
        notes.append(
            f"drafts differ in length: {short:,} tokens less than {rounds:,} drafts of {depth}, taken to be missing "
            f"more often the deeper; a rate by position is off by {100 * off:.1f} % of itself at most"
        )
    return Counters(counted, passed), notes


ASSUMED_ROUNDS = 1000  # of an acceptance length without a number of rounds


def counters_of_length(length: float, k: int, rounds: int | None) -> Counters:
    """Counters of drafts of K tokens whose mean acceptance length is known, but not their acceptance by position.

    Every token is taken to be accepted at the same rate a, if those before it were: 1 + a + a^2 + ... + a^K = length.

    length : output tokens of a round, the target's own included
    rounds : that it is a mean of; None for `ASSUMED_ROUNDS`
    """
    if not 1 <= k <= MOST_DRAFTED:
        raise InputError(f"drafts of K = {k} tokens are impossible; give K from 1 on")
    if not 1 <= length <= k + 1:
        raise InputError(
            f"an acceptance length of {length:g} is impossible with K = {k}: it lies between 1 and K + 1 = {k + 1}, "
            "the target's own token included"
        )
    count = rounds or ASSUMED_ROUNDS
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < length else (low, middle)
    accepted = np.rint(count * high ** np.arange(1, k + 1)).astype(np.int64)
    return Counters(np.full(k, count), accepted)
