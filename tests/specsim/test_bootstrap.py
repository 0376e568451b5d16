"""Bootstrap intervals: do they cover, are they paired, are they repeatable."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from specsim.bootstrap import Estimate, ratio_interval, resample
from specsim.errors import InputError

SEQUENCES, REPEATS = 40, 400
# A percentile interval of n near-normal values is z sd_n / sqrt(n) wide, sd_n with divisor n, and
# thus covers like Student's t with n - 1 degrees at z sqrt((n - 1) / n): 0.940 for 0.95 and n = 40.
EXPECTED = 2 * stats.t.cdf(1.959964 * math.sqrt((SEQUENCES - 1) / SEQUENCES), SEQUENCES - 1) - 1


def covered(confidence: float = 0.95, paired: bool = True) -> int:
    """How often the interval of sum(top) / sum(bottom) holds the true ratio 2, of REPEATS."""
    hits = 0
    for repeat in range(REPEATS):
        rng = np.random.default_rng([repeat, 7])
        bottom = rng.gamma(16.0, 1 / 16, SEQUENCES)
        top = 2 * bottom * (1 + 0.1 * rng.normal(size=SEQUENCES))
        if not paired:
            rng.shuffle(bottom)
        interval = ratio_interval(top, bottom, repeats=1000, seed=repeat, confidence=confidence)
        hits += interval.low <= 2 <= interval.high
    return hits


def test_intervals_cover_as_often_as_they_say() -> None:
    """95 % less the known shortfall of 40 sequences; two-sided binomial test of 400 repeats at 0.1 %.

    It accepts 358 to 391 hits (89.5 % to 97.8 %).
    """
    assert pytest.approx(0.940, abs=5e-4) == EXPECTED
    assert stats.binomtest(covered(), REPEATS, EXPECTED).pvalue > 0.001


@pytest.mark.parametrize("wrong", [{"confidence": 0.85}, {"paired": False}])
def test_the_coverage_test_rejects_intervals_that_are_off(wrong: dict[str, float]) -> None:
    """Too narrow by a tenth, or from sequences whose two sides were torn apart, hence too wide."""
    assert stats.binomtest(covered(**wrong), REPEATS, EXPECTED).pvalue < 0.001  # type: ignore[arg-type]


def test_the_interval_is_the_quantiles_of_resampled_ratios() -> None:
    rng = np.random.default_rng(0)
    top, bottom = rng.random(12) + 1, rng.random(12) + 1
    index = resample(12, seed=5)
    assert index.shape == (2000, 12)
    ratios = sorted(sum(top[row]) / sum(bottom[row]) for row in index)
    result = ratio_interval(top, bottom, seed=5)
    assert result.estimate == pytest.approx(sum(top) / sum(bottom))
    # numpy's default quantile lies between the neighbours of rank 0.025 * 1999 = 49.975
    assert result.low == pytest.approx(0.025 * ratios[49] + 0.975 * ratios[50])
    assert result.high == pytest.approx(0.975 * ratios[1949] + 0.025 * ratios[1950])


def test_one_seed_resamples_the_same_sequences_for_every_policy() -> None:
    """Hence two policies that differ by a constant factor differ by it in every resample."""
    rng = np.random.default_rng(1)
    baseline, policy = rng.random(30) + 1, rng.random(30) + 0.5
    np.testing.assert_array_equal(resample(30, seed=3), resample(30, seed=3))
    one, other = ratio_interval(baseline, policy, seed=3), ratio_interval(baseline, policy / 4, seed=3)
    assert (other.estimate, other.low, other.high) == (4 * one.estimate, 4 * one.low, 4 * one.high)
    ratio_of_both = ratio_interval(policy, policy / 4, seed=3)
    assert (ratio_of_both.low, ratio_of_both.high) == (4, 4)


def test_intervals_repeat_and_depend_on_the_seed() -> None:
    rng = np.random.default_rng(2)
    top, bottom = rng.random(20), rng.random(20) + 1
    assert ratio_interval(top, bottom) == ratio_interval(top, bottom)
    assert ratio_interval(top, bottom, seed=1) != ratio_interval(top, bottom, seed=2)
    wide, narrow = (ratio_interval(top, bottom, confidence=c) for c in (0.99, 0.5))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_resampling_draws_every_sequence_equally_often() -> None:
    """Chi-square over 400,000 draws of 20 sequences."""
    assert stats.chisquare(np.bincount(resample(20, repeats=20_000).ravel(), minlength=20)).pvalue > 1e-3


def test_edges() -> None:
    assert ratio_interval([3.0], [2.0]) == Estimate(1.5, 1.5, 1.5)
    assert str(Estimate(1.5, 1.25, 1.75)) == "1.500 [1.250, 1.750]"
    assert Estimate(1.5, 1.25, 1.75).as_dict() == {"estimate": 1.5, "low": 1.25, "high": 1.75}
    with pytest.raises(InputError, match="no sequence"):
        ratio_interval([], [])
    with pytest.raises(AssertionError, match="per sequence"):
        ratio_interval([1.0, 2.0], [1.0, 2.0, 3.0])
