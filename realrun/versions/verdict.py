"""Decide from restarts whether a version is slower: intervals that stay valid however often they are looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from specsim.io.arrays import Floats
from specsim.replaying.intervals import CONFIDENCE, LARGEST_EXPONENT, Estimate, log_ratio_error, student_quantile

LOOKS = (3, 5, 8, 12)  # restarts after which results are looked at; the last is the most that are made
LEAST_RESTARTS = 2  # that have a spread
HEAD_SHARE, NULL_SHARE = 1.5, 2.0  # variance of head less the mean of two, and of one less another, in a process's
Verdict = Literal["slower", "faster", "no change", "not decidable"]


class Spread(NamedTuple):
    """Standard error of a mean, and its degrees of freedom."""

    error: float
    freedom: int


EXACT = Spread(0.0, 0)


def confidence_of_a_look(rows: int) -> float:
    """Compute the confidence of one interval such that all rows at all looks together have 95 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / (rows * len(LOOKS))


def over_restarts(head: Floats, base: Floats, null: Floats) -> tuple[Spread, Spread]:
    """Compute the spreads of two means: of head less the mean of base and null, and of null less base.

    Processes differ by chance alike, whatever code they run: so both differences tell by how much, and the mean of the
    second is known to be 0. head, base, null : a logarithm per restart [R]
    """
    restarts = head.size
    ratios, null_ratios = head - (base + null) / 2, null - base
    squares = float(((ratios - ratios.mean()) ** 2).sum() / HEAD_SHARE + (null_ratios**2).sum() / NULL_SHARE)
    freedom = 2 * restarts - 1
    of_head, of_null = (math.sqrt(share * squares / freedom / restarts) for share in (HEAD_SHARE, NULL_SHARE))
    return Spread(of_head, freedom), Spread(of_null, freedom)


def over_prompts(a_top: Floats, a_bottom: Floats, b_top: Floats, b_bottom: Floats) -> Spread:
    """Compute the spread of the logarithm of one ratio of sums over another, per-prompt quantities [S] in pairs."""
    if a_top.size == 1:
        return EXACT  # the interval is of this prompt alone
    return Spread(log_ratio_error(a_top, a_bottom, b_top, b_bottom), a_top.size - 1)


def change_percent(log_ratio: float, spreads: Sequence[Spread], confidence: float) -> Estimate:
    """Turn the logarithm of a ratio into a change in percent with its Student interval.

    The errors add in squares; the degrees of freedom are the fewest of any.
    """
    spreads = [spread for spread in spreads if spread.error > 0]
    reach = 0.0
    if spreads:
        freedom = min(spread.freedom for spread in spreads)
        reach = student_quantile(freedom, (1 + confidence) / 2) * math.hypot(*(spread.error for spread in spreads))
    ends = (min(log_ratio + sign * reach, LARGEST_EXPONENT) for sign in (0, -1, 1))
    return Estimate(*(100 * math.expm1(end) for end in ends))


def verdict(slowdown_percent: Estimate, limit_percent: float) -> Verdict:
    """Name a change of seconds per token: significant, smaller than the limit, or neither."""
    if slowdown_percent.low > 0:
        return "slower"
    if slowdown_percent.high < 0:
        return "faster"
    within = max(slowdown_percent.high, -slowdown_percent.low) <= limit_percent
    return "no change" if within else "not decidable"


def exceeds(slowdown_percent: Estimate, limit_percent: float) -> bool | None:
    """Tell whether a slowdown exceeds the limit; None while the interval holds the limit."""
    if slowdown_percent.low > limit_percent:
        return True
    return False if slowdown_percent.high <= limit_percent else None
