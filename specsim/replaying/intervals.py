"""Intervals over sequences: sequences are the independent units, tokens are not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError

ENOUGH = 100  # degrees of freedom from which resamples show the tails of a maximum over hundreds of pairs
ROUNDING = 1e-12  # of a speedup; standard errors below it are rounding alone
LARGEST_FLOOR_PERCENT = 2.0  # noise floor above which a report starts with a warning
LARGEST_EXPONENT = 300.0  # of an uninformative interval; larger exponents overflow
NO_SPECULATION = "no speculation"  # the baseline's label wherever it is a candidate
CONFIDENCE = 0.95  # of intervals
REPEATS = 2000  # resamples of an interval
FEW = 12  # sequences; with fewer, resamples repeat too much to show how the value varies


@dataclass(frozen=True, eq=False)
class Estimate(float):
    """A value with its 95 % interval over sequences.

    It is a float, the value: it compares, adds, formats and converts as the value, and arithmetic drops the interval.
    It equals a number that is its value, and another estimate of the same value and interval.

    Examples
    --------
    >>> from specsim.replaying.intervals import Estimate
    >>> speedup = Estimate(1.25, 1.1, 1.4)
    >>> speedup > 1.1, 2 * speedup, f"{speedup:.1f}", str(speedup), speedup.low
    (True, 2.5, '1.2', '1.250 [1.100, 1.400]', 1.1)
    """

    estimate: float
    low: float
    high: float

    def __new__(cls, estimate: float, low: float, high: float) -> Self:
        return super().__new__(cls, estimate)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Estimate):
            return (self.estimate, self.low, self.high) == (other.estimate, other.low, other.high)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:  # else the float's would be used
        return not self == other

    __hash__ = float.__hash__

    def __getnewargs__(self) -> tuple[float, float, float]:  # type: ignore[override]  # float copies with its value alone
        return self.estimate, self.low, self.high

    @classmethod
    def exact(cls, value: float) -> Self:
        """A value without uncertainty."""
        return cls(value, value, value)

    def __str__(self) -> str:
        return interval_text(self.as_dict())

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def interval_columns(speedup: Estimate) -> dict[str, float]:
    """A speedup as three columns of a table."""
    return {"speedup": speedup.estimate, "speedup_low": speedup.low, "speedup_high": speedup.high}


def interval_text(value: Mapping[str, float]) -> str:
    """An estimate and its interval, of keys estimate, low, high: "1.234 [1.100, 1.350]"."""
    return f"{value['estimate']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def noise_floor_percent(null_arm: Estimate) -> float:
    """Compute the noise floor in percent from an A/A test: how far from 1 the ratio of two equal arms may lie."""
    return 100 * max(null_arm.high - 1, 1 - null_arm.low)


def beyond_floor(floor_percent: float, a: float, b: float) -> bool:
    """Tell whether two measured speedups differ by more than the noise floor."""
    return 100 * abs(a / b - 1) > floor_percent


def against_baseline(speedup: Estimate, floor_percent: float = 0.0) -> Literal["faster", "slower", "not significant"]:
    """Compare a speedup, with its interval, with 1, the baseline's.

    floor_percent : the noise floor of a measurement; smaller differences are not significant
    """
    if beyond_floor(floor_percent, speedup, 1.0):
        if speedup.low > 1:
            return "faster"
        if speedup.high < 1:
            return "slower"
    return "not significant"


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same sequences.

    difference : speedup of a less speedup of b, with its interval
    p_not_better : share of resamples in which a is not faster than b
    sequences : number of sequences compared
    """

    difference: Estimate
    p_not_better: float
    sequences: int

    @property
    def significant(self) -> bool:
        """Whether the two differ significantly (95 %): the interval of the difference excludes 0."""
        return self.sequences > 1 and (self.difference.low > 0 or self.difference.high < 0)

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "significant": self.significant}


def resample(sequences: int, *, repeats: int = REPEATS, seed: int = 0) -> Ints:
    """Draw sequence indices [repeats, sequences] with replacement."""
    return np.random.default_rng(seed).integers(0, sequences, size=(repeats, sequences))


def ratio_interval(
    numerator: npt.ArrayLike,
    denominator: npt.ArrayLike,
    *,
    repeats: int = REPEATS,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """Estimate the ratio of the sums of two per-sequence quantities [S], resampled together.

    The interval is the expanded percentile interval (`tails`). For fewer than FEW sequences it is Student's t on the
    linear part of the ratio's logarithm, so that no end is below 0; for a single sequence it is the value alone.
    The same seed resamples the same sequences, so that intervals of two policies on a trace are paired. Raises
    InputError when there is no sequence.
    """
    top, bottom = filled_columns(numerator, denominator)
    index = resample(top.size, repeats=repeats, seed=seed)
    ratios = _ratios(top, bottom, index)
    value = float(top.sum() / bottom.sum())
    deviations = (top - value * bottom) / bottom.mean()
    found = _estimate(value, ratios, deviations, confidence)
    return _ratio_within(value, found.high - value) if 1 < top.size < FEW else found


def paired_difference(
    baseline_s: npt.ArrayLike,
    a_s: npt.ArrayLike,
    b_s: npt.ArrayLike,
    *,
    repeats: int = REPEATS,
    seed: int = 0,
) -> Comparison:
    """Subtract the speedup of policy b from that of a, over the same baseline; seconds per sequence [S] each.

    Every resample holds the same sequences for both, so that what makes a sequence easy for
    both cancels. Raises InputError when there is no sequence.
    """
    return ratio_difference(baseline_s, a_s, baseline_s, b_s, repeats=repeats, seed=seed)


def ratio_difference(
    a_top: npt.ArrayLike,
    a_bottom: npt.ArrayLike,
    b_top: npt.ArrayLike,
    b_bottom: npt.ArrayLike,
    *,
    repeats: int = REPEATS,
    seed: int = 0,
) -> Comparison:
    """Subtract the ratio of sums of b from that of a, per-sequence quantities [S], resampled together.

    Speedups over baselines of their own, or acceptance lengths (tokens over rounds). Raises InputError when
    no sequence has output.
    """
    a, over_a, b, over_b = filled_columns(a_top, a_bottom, b_top, b_bottom)
    index = resample(a.size, repeats=repeats, seed=seed)
    differences = _ratios(a, over_a, index) - _ratios(b, over_b, index)
    of_a, of_b = float(a.sum() / over_a.sum()), float(b.sum() / over_b.sum())
    deviations = (a - of_a * over_a) / over_a.mean() - (b - of_b * over_b) / over_b.mean()
    return Comparison(
        difference=_estimate(of_a - of_b, differences, deviations, CONFIDENCE),
        p_not_better=float((differences[~np.isnan(differences)] <= 0).mean()),
        sequences=a.size,
    )


def ratio_of_ratios(
    a_top: npt.ArrayLike,
    a_bottom: npt.ArrayLike,
    b_top: npt.ArrayLike,
    b_bottom: npt.ArrayLike,
) -> Estimate:
    """Divide the ratio of sums of a by that of b, per-sequence quantities [S] of the same sequences.

    The interval is Student's t on the linear part of the logarithm, in pairs: what makes a sequence easy for both
    cancels. For a single sequence it is the value alone. Raises InputError when there is no sequence or a sum is 0.
    """
    columns = filled_columns(a_top, a_bottom, b_top, b_bottom)
    sums = [float(column.sum()) for column in columns]
    if not all(total > 0 for total in sums):
        raise InputError("a ratio of ratios: a sum is not positive; compare other sequences")
    value = sums[0] / sums[1] / (sums[2] / sums[3])
    sequences = columns[0].size
    if sequences == 1:
        return Estimate.exact(value)
    # At most exp(51), of two sequences of which each has two of the sums.
    factor = math.exp(student_quantile(sequences - 1, (1 + CONFIDENCE) / 2) * log_ratio_error(*columns))
    return Estimate(value, value / factor, value * factor)


def log_ratio_error(a_top: Floats, a_bottom: Floats, b_top: Floats, b_bottom: Floats) -> float:
    """Standard error of the logarithm of sum over sum of a, over that of b, from S > 1 sequences in pairs."""
    signed = ((a_top, 1), (a_bottom, -1), (b_top, -1), (b_bottom, 1))
    influence = np.sum([sign * column / column.mean() for column, sign in signed], axis=0)
    return float(influence.std(ddof=1)) / math.sqrt(influence.size)


def tails(sequences: int, confidence: float) -> tuple[float, float]:
    """Quantiles of the resampled values that bound the interval.

    The plain percentile interval of n values is too narrow: it leaves out the factor
    sqrt(n / (n - 1)) of the standard deviation and takes normal for Student quantiles. The
    quantiles are therefore moved outwards to Phi(+-sqrt(n / (n - 1)) t_(n-1)), "expanded
    percentile" in Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 4.3.
    """
    if sequences < 2:
        return 0.0, 1.0
    student = student_quantile(sequences - 1, (1 + confidence) / 2)
    high = math.erfc(-student * math.sqrt(sequences / (sequences - 1) / 2)) / 2
    return 1 - high, high


def student_quantile(freedom: int, prob: float) -> float:
    """Compute the quantile of Student's t at this probability, which must be at least 0.5.

    By Newton's method on the finite sum that the distribution is (Abramowitz and Stegun, 26.7.3 and 26.7.4), because
    SciPy takes longer to import than everything else that a replay does.
    """
    odd = freedom % 2
    peak = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    value = 0.0
    while True:  # from below, because the distribution is concave
        angle = math.atan(value / math.sqrt(freedom))
        cosine = math.cos(angle)
        inside, term = 0.0, math.sin(angle) * cosine**odd  # inside : the probability of (-value, value)
        for power in range(odd, freedom - 1, 2):
            inside += term
            term *= cosine**2 * (power + 1) / (power + 2)
        if odd:
            inside = 2 / math.pi * (angle + inside)
        step = (prob - (1 + inside) / 2) / (peak * cosine ** (freedom + 1))
        if not step > 1e-15 * value:
            return value
        value += step


def _quantile_between(freedom: float, prob: float) -> float:
    """Student's quantile at degrees of freedom, at least 1, that need not be whole; at most 5 % above the exact one.

    Its logarithm is interpolated along the inverse of the degrees, in which it is convex.
    """
    fewer = int(freedom)
    low, high = (math.log(student_quantile(whole, prob)) for whole in (fewer, fewer + 1))
    share = (1 / freedom - 1 / (fewer + 1)) * fewer * (fewer + 1)  # 1 / fewer - 1 / (fewer + 1) is one over the product
    return math.exp(high + share * (low - high))


def filled_columns(*values: npt.ArrayLike) -> list[Floats]:
    """Drop sequences in which all columns [S] are 0; raise InputError if none is left."""
    columns = [np.asarray(value, dtype=np.float64) for value in values]
    assert all(column.shape == columns[0].shape for column in columns), "a value per sequence in each column"
    if columns[0].size == 0:
        raise InputError("bootstrap: no sequence; give at least 1")
    counted = np.any(columns, axis=0)  # a sequence without output has no weight in a ratio of sums
    if not counted.any():
        raise InputError("bootstrap: every sequence is empty; give sequences with output")
    return [column[counted] for column in columns]


def _ratios(top: Floats, bottom: Floats, index: Ints) -> Floats:
    """Compute sum over sum in every resample; NaN where the denominator is 0."""
    below = bottom[index].sum(axis=1)
    return np.divide(top[index].sum(axis=1), below, out=np.full(below.shape, np.nan), where=below != 0)


def _estimate(value: float, resampled: Floats, deviations: Floats, confidence: float) -> Estimate:
    """Estimate the value's interval from its resamples or, for few sequences, from their linear influence."""
    sequences = deviations.size
    if not 1 < sequences < FEW:
        low, high = np.nanquantile(resampled, tails(sequences, confidence))
        return Estimate(value, float(low), float(high))
    error = float(deviations.std(ddof=1)) / math.sqrt(sequences)
    reach = student_quantile(sequences - 1, (1 + confidence) / 2) * error
    return Estimate(value, value - reach, value + reach)


def _ratio_within(value: float, reach: float) -> Estimate:
    """A ratio within its reach on the logarithm, to first order as far as `reach`, so that no end is below 0."""
    if value <= 0:
        return Estimate(value, value - reach, value + reach)
    factor = math.exp(min(reach / value, LARGEST_EXPONENT))
    return Estimate(value, value / factor, value * factor)


@dataclass(frozen=True)
class Simultaneous:
    """Speedups of policies over a baseline, and their differences, with 95 % intervals that hold all at once.

    So a board's leader may be picked on the same sequences. The candidates are the policies and no speculation. Every
    pair of them is compared by the same statistic, the difference of their speedups in standard errors, and a critical
    value bounds the largest over all pairs (max-t, as Tukey's range): the leader against each row is then covered
    whichever candidate leads, and equal candidates are called different on at most 5 % of boards. Hsu's comparisons
    with the best are narrower, but protect the best alone: they call some of several equal policies slower.

    speedups : of each policy, its interval also against no speculation; of fewer than FEW sequences on the logarithm,
        as in `ratio_interval`, so that no end is below 0
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
    1: S - 1 for sequences that take equally long, fewer where a few long ones carry the sums. They are rounded down,
    except of fewer than FEW sequences, where one less would widen intervals several times.

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
    reaches = zip(values[1:].tolist(), (critical * _standard_errors(deviations)[1:]).tolist(), strict=True)
    few = 1 < base.size < FEW
    return Simultaneous(
        speedups=[
            _ratio_within(value, reach) if few else Estimate(value, value - reach, value + reach)
            for value, reach in reaches
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
    freedom = max(1.0, float(weights.sum() ** 2 / (weights**2).sum()) - 1 + 1e-9)
    pairs = max(1, differences.shape[1])
    prob = 1 - (1 - CONFIDENCE) / 2 / pairs
    bound = _quantile_between(freedom, prob) if sequences < FEW else student_quantile(int(freedom), prob)
    if freedom < ENOUGH or not differences.size:
        return bound
    places = resample(sequences, repeats=repeats, seed=seed) + sequences * np.arange(repeats)[:, None]
    counts = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape).astype(np.float64)
    means, squares = counts @ differences / sequences, counts @ differences**2 / sequences
    errors = np.sqrt(np.maximum(squares - means**2, ROUNDING**2) / (sequences - 1))
    largest = np.abs(means / errors).max(axis=1)
    return min(bound, float(np.quantile(largest, CONFIDENCE)))
