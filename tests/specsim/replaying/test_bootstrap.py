"""Bootstrap intervals: do they cover, are they paired, are they repeatable."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from specsim.acceptance.generate import generate
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import (
    Comparison,
    Estimate,
    paired_difference,
    ratio_difference,
    ratio_interval,
    ratio_of_ratios,
    resample,
    student_quantile,
    tails,
)
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.acceptance_examples import COST, difficulty

SEQUENCES, REPEATS = 40, 400
# Factor on the normal quantile that a percentile interval would need and the expanded interval has.
EXPANSION = math.sqrt(SEQUENCES / (SEQUENCES - 1)) * stats.t.ppf(0.975, SEQUENCES - 1) / 1.959964


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
    """Two-sided binomial test of 400 repeats at 0.1 %: it accepts 364 to 393 hits."""
    assert stats.binomtest(covered(), REPEATS, 0.95).pvalue > 0.001


@pytest.mark.parametrize("wrong", [{"confidence": 0.85}, {"paired": False}])
def test_the_coverage_test_rejects_intervals_that_are_off(wrong: dict[str, float]) -> None:
    """Too narrow by a tenth, or from sequences whose two sides were torn apart, hence too wide."""
    assert stats.binomtest(covered(**wrong), REPEATS, 0.95).pvalue < 0.001


def test_the_interval_is_the_quantiles_of_resampled_ratios() -> None:
    rng = np.random.default_rng(0)
    top, bottom = rng.random(12) + 1, rng.random(12) + 1
    index = resample(12, seed=5)
    assert index.shape == (2000, 12)
    ratios = sorted(sum(top[row]) / sum(bottom[row]) for row in index)
    result = ratio_interval(top, bottom, seed=5)
    assert result.estimate == pytest.approx(sum(top) / sum(bottom))
    # t with 11 degrees is 2.200985, times sqrt(12 / 11) 2.298843, whose normal tail is 0.010757;
    # numpy's default quantile lies between the neighbours of rank 0.010757 * 1999 = 21.50.
    low, high = tails(12, 0.95)
    assert (low, high) == (pytest.approx(0.010757, abs=2e-6), pytest.approx(1 - 0.010757, abs=2e-6))
    assert ratios[21] < result.low < ratios[22]
    assert ratios[1977] < result.high < ratios[1978]


def test_tails_are_moved_outwards_and_come_back_with_more_sequences() -> None:
    lows = [tails(n, 0.95)[0] for n in (2, 3, 5, 10, 40, 1000, 10**7)]
    assert lows == sorted(lows) and lows[-1] == pytest.approx(0.025, abs=1e-7)
    assert tails(40, 0.95)[1] == pytest.approx(stats.norm.cdf(1.959964 * EXPANSION))
    assert tails(1, 0.95) == (0.0, 1.0)


def test_one_seed_resamples_the_same_sequences_for_every_policy() -> None:
    """Hence two policies that differ by a constant factor differ by it in every resample."""
    rng = np.random.default_rng(1)
    baseline, policy = rng.random(30) + 1, rng.random(30) + 0.5
    np.testing.assert_array_equal(resample(30, seed=3), resample(30, seed=3))
    slow, fast = ratio_interval(baseline, policy, seed=3), ratio_interval(baseline, policy / 4, seed=3)
    assert (fast.estimate, fast.low, fast.high) == (4 * slow.estimate, 4 * slow.low, 4 * slow.high)
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
    with pytest.raises(InputError, match="no sequence"):
        paired_difference([], [], [])


@cache
def synthetic_seconds(count: int = 18_000) -> dict[str, np.ndarray]:
    """Seconds per sequence of that many synthetic texts of 60 to 140 tokens, by policy; and the baseline's.

    Texts differ: the share of first tokens accepted has a standard deviation of 0.16 over them,
    more than the 0.13 of the lab's recorded greedy trace.
    """
    lengths = np.random.default_rng(0).integers(60, 141, count)
    trace = generate(difficulty(), count, lengths, 6, seed=21)
    table = cost_table(trace, COST)
    policies = {
        "k4": FixedK(k=4),
        "k3": FixedK(k=3),
        "adaedl": AdaEDL(gamma=0.2, lambda0=0.4, dynamic=False, max_draft_tokens=6),
    }
    results = {name: replay(trace, policy, table) for name, policy in policies.items()}
    seconds = {name: result.speculative_s for name, result in results.items()}
    return {"baseline": results["k4"].autoregressive_s, **seconds}


def coverage(seconds: dict[str, np.ndarray], policy: str, sequences: int, repetitions: int) -> float:
    """How often the 95 % interval over that many sequences holds the speedup over all of them."""
    baseline, own = seconds["baseline"], seconds[policy]
    truth = baseline.sum() / own.sum()
    hits = 0
    for repetition in range(repetitions):
        rows = slice(repetition * sequences, (repetition + 1) * sequences)
        interval = ratio_interval(baseline[rows], own[rows], repeats=1000, seed=repetition)
        hits += interval.low <= truth <= interval.high
    return hits / repetitions


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [8, 12, 24, 60, 100])
def test_the_speedup_s_interval_covers_the_truth(sequences: int) -> None:
    """As many repetitions as 60,000 texts allow, up to 2000."""
    seconds = synthetic_seconds(60_000)
    for policy in ("k4", "k3", "adaedl"):
        share = coverage(seconds, policy, sequences, min(2000, 60_000 // sequences))
        assert 0.92 <= share <= 0.98, (policy, share)


def test_a_difference_is_that_of_the_speedups_in_common_resamples() -> None:
    rng = np.random.default_rng(3)
    base, a = rng.random(15) + 2, rng.random(15) + 1
    b = 0.8 * a + 0.1 * rng.random(15)
    comparison = paired_difference(base, a, b, seed=4)
    first, second = ratio_interval(base, a, seed=4), ratio_interval(base, b, seed=4)
    assert comparison.difference.estimate == pytest.approx(first.estimate - second.estimate)
    index = resample(15, seed=4)
    by_hand = np.array([sum(base[row]) / sum(a[row]) - sum(base[row]) / sum(b[row]) for row in index])
    low, high = np.quantile(by_hand, tails(15, 0.95))
    assert (comparison.difference.low, comparison.difference.high) == (pytest.approx(low), pytest.approx(high))
    assert comparison.p_not_better == (by_hand <= 0).mean()
    # Pairing: far narrower than the two intervals would suggest.
    assert comparison.difference.high - comparison.difference.low < 0.5 * (first.high - first.low)


def test_comparisons_tell_better_from_worse() -> None:
    rng = np.random.default_rng(5)
    base, fast = rng.random(20) + 2, rng.random(20) + 1
    better = paired_difference(base, fast, 1.1 * fast)
    assert better.significant and better.p_not_better == 0.0
    worse = paired_difference(base, 1.1 * fast, fast)
    assert worse.significant and worse.p_not_better == 1.0
    assert worse.difference.estimate == -better.difference.estimate
    same = paired_difference(base, fast, fast)
    assert not same.significant and same.p_not_better == 1.0
    assert same == Comparison(Estimate(0.0, 0.0, 0.0), 1.0, 20)
    assert same.as_dict() == {
        "difference": {"estimate": 0.0, "low": 0.0, "high": 0.0},
        "p_not_better": 1.0,
        "sequences": 20,
        "significant": False,
    }


def test_equal_policies_are_separated_one_time_in_twenty() -> None:
    """Null hypothesis: k3's and k4's seconds of each text swapped at random. 600 repetitions of 24 texts.

    Binomial tests at 0.1 %; p_not_better is near uniform, so it falls below 5 % about as often.
    """
    seconds = synthetic_seconds()
    rng = np.random.default_rng(6)
    repetitions, sequences = 600, 24
    separated, low_p = 0, 0
    for repetition in range(repetitions):
        rows = slice(repetition * sequences, (repetition + 1) * sequences)
        swap = rng.random(sequences) < 0.5
        k3, k4 = seconds["k3"][rows], seconds["k4"][rows]
        comparison = paired_difference(
            seconds["baseline"][rows], np.where(swap, k3, k4), np.where(swap, k4, k3), repeats=1000, seed=repetition
        )
        separated += comparison.significant
        low_p += comparison.p_not_better <= 0.05
    assert stats.binomtest(separated, repetitions, 0.05).pvalue > 0.001
    assert 0.03 <= low_p / repetitions <= 0.10


def test_a_difference_s_interval_covers_the_true_difference() -> None:
    """AdaEDL against K = 4 over 500 repetitions of 24 texts: 92 % to 98 %."""
    seconds = synthetic_seconds()
    base, a, b = (seconds[name] for name in ("baseline", "adaedl", "k4"))
    truth = base.sum() / a.sum() - base.sum() / b.sum()
    hits = 0
    for repetition in range(500):
        rows = slice(repetition * 24, (repetition + 1) * 24)
        comparison = paired_difference(base[rows], a[rows], b[rows], repeats=1000, seed=repetition).difference
        hits += comparison.low <= truth <= comparison.high
    assert 0.92 <= hits / 500 <= 0.98


@pytest.mark.parametrize("sequences", [3, 4, 6, 8, 11])
def test_few_sequences_are_not_taken_for_many(sequences: int) -> None:
    """Equal policies are told apart in about 5 % of 2000 trials, and the interval covers in about 95 %.

    Binomial limits at 0.1 % would be 3.6 to 6.7 %; Student's t is exact for normal values only, and
    these are skewed, hence 3 to 8 %.
    """
    rng = np.random.default_rng(sequences)
    told_apart = missed = 0
    trials = 2000
    for _ in range(trials):
        base = rng.gamma(20.0, size=sequences)
        a, b = (base / 1.5 * rng.gamma(30.0, 1 / 30, size=sequences) for _ in range(2))
        told_apart += paired_difference(base, a, b, repeats=2).significant
        interval = ratio_interval(base, a, repeats=2)
        missed += not interval.low <= 1.5 <= interval.high
    assert 0.03 <= told_apart / trials <= 0.08
    assert 0.03 <= missed / trials <= 0.08


def test_one_sequence_tells_nothing_apart() -> None:
    assert not paired_difference([3.0], [1.0], [2.0]).significant


def test_ratios_over_their_own_baselines_are_compared_sequence_by_sequence() -> None:
    rng = np.random.default_rng(3)
    base, other, a, b = rng.random((4, 20)) + 1
    index = resample(20)
    comparison = ratio_difference(base, a, other, b)
    assert comparison.difference.estimate == pytest.approx(base.sum() / a.sum() - other.sum() / b.sum())
    drawn = base[index].sum(1) / a[index].sum(1) - other[index].sum(1) / b[index].sum(1)
    assert comparison.p_not_better == pytest.approx((drawn <= 0).mean())
    same = ratio_difference(base, a, 3 * base, 3 * a)
    assert same.difference.estimate == pytest.approx(0) and not same.significant
    assert ratio_difference(base, a, base, b) == paired_difference(base, a, b)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 11, 35, 36, 999, 4000])
@pytest.mark.parametrize("prob", [0.5, 0.6, 0.95, 0.975, 0.9995])
def test_quantiles_of_student_are_scipys(freedom: int, prob: float) -> None:
    assert student_quantile(freedom, prob) == pytest.approx(stats.t(freedom).ppf(prob), rel=1e-11, abs=1e-15)


@pytest.mark.parametrize("sequences", [1, 5, 14])
def test_sequences_without_output_change_no_interval(sequences: int) -> None:
    """Nine of ten are empty, so that many a resample would draw nothing but those; warnings are errors here."""
    rng = np.random.default_rng(7)
    base, a, b = rng.random((3, sequences)) + 1
    padded = [np.concatenate([np.zeros(9 * sequences), values]) for values in (base, a, b)]
    assert ratio_interval(*padded[:2]) == ratio_interval(base, a)
    assert paired_difference(*padded) == paired_difference(base, a, b)
    assert ratio_of_ratios(padded[0], padded[1], padded[0], padded[2]) == ratio_of_ratios(base, a, base, b)
    with pytest.raises(InputError, match="every sequence is empty"):
        ratio_interval(np.zeros(3), np.zeros(3))


def test_resamples_that_drew_nothing_below_are_left_out() -> None:
    """One of twelve sequences has all drafts: where it is not drawn (0.35 of resamples) there is no rate."""
    accepted, drafted = np.array([3.0] + [0.0] * 11), np.array([4.0] + [0.0] * 11)
    rounds = np.ones(12)
    comparison = ratio_difference(accepted, drafted, 0.5 * rounds, rounds)
    assert comparison.difference == Estimate(0.25, 0.25, 0.25) and comparison.p_not_better == 0.0
