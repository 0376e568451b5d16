"""Printed figures as the intervals that round to them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

SLACK = 1e-9  # of decimals that are no binary fractions


class Interval(NamedTuple):
    """All numbers from low to high."""

    low: float
    high: float

    def meets(self, other: Interval) -> bool:
        return self.low <= other.high + SLACK and other.low <= self.high + SLACK


def rounded_to(text: str) -> Interval:
    """What rounds to a printed decimal: half a unit of its last digit to both sides."""
    digits = len(text.partition(".")[2])
    half = 0.5 * 10.0**-digits
    return Interval(float(text) - half, float(text) + half)


def image(function: Callable[..., float], *intervals: Interval) -> Interval:
    """What a function makes of all values inside, if it is monotone in each argument."""
    values = [float(function(*corner)) for corner in product(*intervals)]
    return Interval(min(values), max(values))
