"""Counts from what engines print: rates with three decimals, sums of drafts that may differ in length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import MOST_COUNT, MOST_DRAFTED, Counters
from specsim.arrays import Ints
from specsim.errors import InputError

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
    """Counts by position, and how many tokens one of them may be off by."""

    accepted: Ints
    off_by: int


def counts_of_rates(rates: Sequence[Printed], rounds: int, accepted: int) -> Counted | None:
    """Rounds that accepted so far, whose shares of all rounds are printed, `accepted` in sum; None where none fit."""
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
    """What a line comes to: rounds, tokens drafted, counts by position, and how many rounds it may be off by."""

    rounds: int
    drafted: int
    counted: Counted
    rounds_off_by: int


def part_of(mean_length: Printed, rates: Sequence[Printed], drafted: int, accepted: int) -> Part | None:
    """The least number of rounds, next to drafts of one length, of which a line is printed so; None where none is.

    mean_length : 1 + accepted / rounds
    rates : of rounds that accepted so far among all rounds
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
    """Counters of lines that count one after another, and what is to be said of them."""
    depth = max(len(part.counted.accepted) for part in parts)
    accepted = [
        sum(int(part.counted.accepted[i]) for part in parts if i < len(part.counted.accepted)) for i in range(depth)
    ]
    found, notes = counters(sum(part.rounds for part in parts), sum(part.drafted for part in parts), accepted, instead)
    tokens, rounds = sum(part.counted.off_by for part in parts), sum(part.rounds_off_by for part in parts)
    if tokens or rounds:
        notes.append(
            f"counts follow from rounded rates: rounds within {rounds:,}, tokens of a position within {tokens:,}"
        )
    return found, notes


def counters(rounds: int, drafted: int, accepted: Sequence[int], instead: str) -> tuple[Counters, list[str]]:
    """Counters by position from the tokens drafted in all, and what is to be said of them.

    Where drafts differ in length, which rounds drafted an i-th token is not told. A few that end early, at the limit
    on output tokens, change little; InputError where it could be more than MOST_SHORT, as under a schedule of K.

    instead : what to import then
    """
    if not 0 < rounds <= drafted <= MOST_COUNT or sum(accepted) > drafted:
        raise InputError(f"{drafted} tokens in {rounds} drafts, {sum(accepted)} accepted, cannot be; export again")
    depth = max(len(accepted), -(-drafted // rounds))
    if depth > MOST_DRAFTED:
        raise InputError(f"drafts of {depth} tokens cannot be; export again")
    passed = np.zeros(depth, dtype=np.int64)
    passed[: len(accepted)] = accepted
    short = rounds * depth - drafted
    off = short * max(1 - 2 / depth, 0.0) / rounds  # were all of it missing from the last position; of two it is
    if off > MOST_SHORT or (short and depth == 1):
        raise InputError(
            f"drafts differ in length ({drafted:,} tokens in {rounds:,} drafts of up to {depth}), so that counts by "
            f"position cannot be divided by drafts; {instead}"
        )
    weight = np.arange(depth, dtype=np.int64)
    missing = short * weight // max(int(weight.sum()), 1)
    missing[-1] += short - int(missing.sum())
    counted = rounds - missing
    if (np.diff(passed) > 0).any() or (passed > counted).any() or (passed < 0).any():
        raise InputError("counts by position grow with the position, or exceed the drafts; export them together")
    notes = []
    if off:
        notes.append(
            f"drafts differ in length: {short:,} tokens less than {rounds:,} drafts of {depth}, taken to be missing "
            f"more often the deeper; a rate by position is off by {100 * off:.1f} % of itself at most"
        )
    return Counters(counted, passed), notes
