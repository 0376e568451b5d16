"""Intervals that hold for all policies of a board at once, so that its leader may be picked on the same sequences.

The candidates are the policies and no speculation. Every pair of them is compared by the same statistic, the
difference of their speedups in standard errors, and a critical value bounds the largest over all pairs (max-t, as
Tukey's range): the leader against each row is then covered whichever candidate leads, and equal candidates are called
different on at most 5 % of boards. Hsu's comparisons with the best are narrower, but protect the best
alone: they call some of several equal policies slower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats
from specsim.replaying.intervals import (
    CONFIDENCE,
    REPEATS,
    Comparison,
    Estimate,
    filled_columns,
    paired_difference,
    resample,
    student_quantile,
)

ENOUGH = 100  # degrees of freedom from which resamples show the tails of a maximum over hundreds of pairs
ROUNDING = 1e-12  # of a speedup; standard errors below it are rounding alone


@dataclass(frozen=True)
class Simultaneous:
    """Speedups of policies over a baseline, and their differences, with 95 % intervals that hold all at once.

    speedups : of each policy, its interval also against no speculation
    critical : half the width of every interval, in standard errors
    """

    speedups: list[Estimate]
    critical: float
    baseline_s: Floats
    seconds: Floats

    def difference(self, a: int, b: int) -> Comparison:
        """Subtract the speedup of policy b from that of a; p_not_better is of this pair alone."""
        pair = paired_difference(self.baseline_s, self.seconds[a], self.seconds[b])
        deviation = _deviations(self.baseline_s, self.seconds[[a, b]])
        reach = self.critical * float(_standard_errors(deviation[:, :1] - deviation[:, 1:])[0])
        value = pair.difference.estimate
        return dataclasses.replace(pair, difference=Estimate(value, value - reach, value + reach))


def simultaneous(
    baseline_s: npt.ArrayLike,
    seconds: Sequence[npt.ArrayLike],
    *,
    repeats: int = REPEATS,
    seed: int = 0,
) -> Simultaneous:
    """Compare all policies of a board, and no speculation, at once.

    baseline_s : array of S seconds, per sequence, without speculation
    seconds : of each policy, S seconds of the same sequences
    repeats, seed : of the bootstrap over sequences, as in `paired_difference`

    Raises InputError if there is no sequence.

    The critical value of many sequences is the quantile of the largest studentised difference over the bootstrap's
    resamples, each with its own standard errors; a critical value from Bonferroni's inequality and Student's t caps
    it, and stands alone below 100 degrees of freedom, where the resamples' tails are too coarse. Degrees of
    freedom are Satterthwaite's for noise in proportion to a sequence's baseline seconds w, (sum w^2)^2 / sum w^4 -
    1: S - 1 for sequences that take equally long, fewer where a few long ones carry the sums.

    References: Hsu 1996, Multiple Comparisons: Theory and Methods, chapters 4 and 5. Romano and Wolf 2005, Exact and
    Approximate Stepdown Methods for Multiple Hypothesis Testing, JASA 100 (max-t). Satterthwaite 1946, An Approximate
    Distribution of Estimates of Variance Components, Biometrics 2.

    >>> board = simultaneous([2.0, 4.0, 3.0, 3.0], [[1.0, 2.1, 1.4, 1.6], [2.0, 4.1, 2.9, 3.0]])
    >>> [round(speedup, 3) for speedup in board.speedups]
    [1.967, 1.0]
    >>> board.difference(0, 1).significant
    True
    """
    base, *rows = filled_columns(baseline_s, *seconds)
    arms = np.stack([base, *rows])
    deviations = _deviations(base, arms)
    values = base.sum() / arms.sum(axis=1)
    critical = _critical(base, deviations, repeats, seed)
    errors = _standard_errors(deviations)
    return Simultaneous(
        speedups=[
            Estimate(float(value), float(value - critical * error), float(value + critical * error))
            for value, error in zip(values[1:], errors[1:], strict=True)
        ],
        critical=critical,
        baseline_s=base,
        seconds=arms[1:],
    )


def _deviations(baseline_s: Floats, arms: Floats) -> Floats:
    """Compute each sequence's linear influence on each arm's speedup [S, arms]."""
    values = baseline_s.sum() / arms.sum(axis=1, keepdims=True)
    return np.asarray(((baseline_s - values * arms) / arms.mean(axis=1, keepdims=True)).T)


def _standard_errors(deviations: Floats) -> Floats:
    """Compute the standard error of each column's mean; 0 for a single sequence."""
    if len(deviations) == 1:
        return np.zeros(deviations.shape[1])
    return np.asarray(deviations.std(axis=0, ddof=1) / math.sqrt(len(deviations)))


def _critical(baseline_s: Floats, deviations: Floats, repeats: int, seed: int) -> float:
    """Compute the critical value: the standard errors by which pairs of equal arms may differ, all at once."""
    sequences, arms = deviations.shape
    first, second = np.triu_indices(arms, 1)
    differences = deviations[:, first] - deviations[:, second]
    differences = differences[:, _standard_errors(differences) > ROUNDING]
    weights = baseline_s**2
    freedom = float(weights.sum() ** 2 / (weights**2).sum()) - 1
    pairs = max(1, differences.shape[1])
    bound = student_quantile(max(1, int(freedom + 1e-9)), 1 - (1 - CONFIDENCE) / 2 / pairs)
    if freedom < ENOUGH or not differences.size:
        return bound
    places = resample(sequences, repeats=repeats, seed=seed) + sequences * np.arange(repeats)[:, None]
    counts = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape).astype(np.float64)
    means, squares = counts @ differences / sequences, counts @ differences**2 / sequences
    errors = np.sqrt(np.maximum(squares - means**2, ROUNDING**2) / (sequences - 1))
    largest = np.abs(means / errors).max(axis=1)
    return min(bound, float(np.quantile(largest, CONFIDENCE)))
