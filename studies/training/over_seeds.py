"""Intervals over seeds and sequences: a training repeated with other seeds, each measured on the same sequences."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats
from specsim.replaying.intervals import Estimate


def linear_parts(top: npt.ArrayLike, bottom: npt.ArrayLike) -> Floats:
    """What every sequence adds, to first order, to each seed's ratio of sums over sequences.

    top, bottom : array_like, shape (R, S), of R seeds on the same S sequences, such as tokens and rounds. Every seed's
        `bottom` sums to more than 0

    Returns [R, S], whose mean over sequences is the seed's ratio, sum of `top` over sum of `bottom`.

    >>> from studies.training.over_seeds import linear_parts
    >>> linear_parts([[2, 4], [3, 3]], [[1, 1], [1, 2]]).mean(axis=1)
    array([3., 2.])
    """
    over, under = (np.asarray(values, dtype=np.float64) for values in (top, bottom))
    ratios = over.sum(axis=1, keepdims=True) / under.sum(axis=1, keepdims=True)
    parts: Floats = ratios + (over - ratios * under) / under.mean(axis=1, keepdims=True)
    return parts


def mean_over_seeds(parts: Floats) -> Estimate:
    """The mean over seeds of a ratio of sums over sequences, with the 95 % interval over both.

    With x_rs the linear part of seed r at sequence s, the interval reaches as far as those over seeds and over
    sequences together,

        reach^2  =  (t_{R-1} sd_r(mean_s x_rs) / sqrt(R))^2  +  (t_{S-1} sd_s(mean_r x_rs) / sqrt(S))^2

    What sequence and seed do together is counted in both terms, and t_2 = 4.3 of three seeds asks much: the interval is
    too wide rather than narrow.

    parts : float array, shape (R, S), linear parts of R > 1 seeds on S > 1 sequences; of a paired difference, those of
        a minus those of b

    References: Howe 1974, Approximate Confidence Limits on the Mean of X + Y, J. Am. Stat. Assoc. 69.
    """
    value = float(parts.mean())
    reach = math.hypot(_reach(parts.mean(axis=1)), _reach(parts.mean(axis=0)))
    return Estimate(value, value - reach, value + reach)


def _reach(values: Floats) -> float:
    """Half the 95 % interval of the mean of independent values [n]."""
    from scipy.special import stdtrit

    return float(stdtrit(values.size - 1, 0.975) * values.std(ddof=1)) / math.sqrt(values.size)
