"""Intervals: of ratios by the bootstrap, of a board at once, of a forecast, and the number that carries one."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import specsim
from specsim.acceptance.generate import generate
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.forecast import error_summary, forecast_interval
from specsim.replaying.intervals import (
    Comparison,
    Estimate,
    Simultaneous,
    against_baseline,
    paired_difference,
    ratio_difference,
    ratio_interval,
    ratio_of_ratios,
    resample,
    simultaneous,
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


def test_resampling_draws_every_sequence_equally_often() -> None:
    """Chi-square over 400,000 draws of 20 sequences."""
    assert stats.chisquare(np.bincount(resample(20, repeats=20_000).ravel(), minlength=20)).pvalue > 1e-3


def test_edges_of_ratios() -> None:
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


def test_an_interval_that_tells_nothing_is_wide_and_finite() -> None:
    """Student's t of one degree of freedom is 6e5 there, whose exponential overflows."""
    found = ratio_interval([1.0, 2.0], [1.0, 1.0], confidence=1 - 1e-6)
    assert 0 < found.low < 1e-100 and 1e100 < found.high < np.inf


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


MOST_FALSE = 0.05
POLICIES = 28


def seconds_of(
    rng: np.random.Generator, prompts: int, speedups: np.ndarray, noise: np.ndarray, lengths_sd: float = 0.3
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Baseline and policies' seconds on prompts of different lengths, each measured with noise, a share of itself."""
    base = rng.lognormal(0.0, lengths_sd, prompts)
    return base, [base / s * (1 + sd * rng.normal(size=prompts)) for s, sd in zip(speedups, noise, strict=True)]


def leader_of(found: Simultaneous) -> int:
    return int(np.argmax([speedup.estimate for speedup in found.speedups]))


def false_boards(boards: int, prompts: int, noise: np.ndarray, *, pairwise: bool = False, seed: int = 0) -> int:
    """Boards of equal policies on which the leader is called significantly faster than some row."""
    rng = np.random.default_rng(seed)
    count = 0
    for _ in range(boards):
        base, seconds = seconds_of(rng, prompts, np.full(len(noise), 2.0), noise)
        intervals = simultaneous(base, seconds, repeats=400)
        leader = leader_of(intervals)
        others = [at for at in range(len(noise)) if at != leader]
        if pairwise:
            count += any(
                paired_difference(base, seconds[leader], seconds[at], repeats=400).significant for at in others
            )
        else:
            count += any(intervals.difference(leader, at).significant for at in others)
    return count


def upper_limit(boards: int) -> int:
    """What a binomial count of 5 % stays below in 99.9 % of runs."""
    return int(stats.binom.ppf(0.999, boards, MOST_FALSE))


def test_28_equal_policies_on_12_prompts_are_not_called_different() -> None:
    noise = np.full(POLICIES, 0.1)
    assert false_boards(100, 12, noise) <= upper_limit(100)
    assert false_boards(20, 12, noise, pairwise=True) >= 19  # pair by pair nearly every board has a false difference


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [6, 12, 40, 100, 200])
@pytest.mark.parametrize("noise", [np.full(POLICIES, 0.1), np.geomspace(0.01, 0.3, POLICIES)], ids=["equal", "unequal"])
def test_false_differences_stay_below_5_percent_of_boards(prompts: int, noise: np.ndarray) -> None:
    assert false_boards(1000, prompts, noise) <= upper_limit(1000)


def boards_covered(boards: int, prompts: int, lengths_sd: float, seed: int = 0) -> int:
    """Boards on which every interval holds its true value: each speedup, and each difference to the leader.

    Ten policies of speedups 0.8 to 2.5 with noise of 2 to 30 %, half of which they share.
    """
    rng = np.random.default_rng(seed)
    truth, noise = np.linspace(0.8, 2.5, 10), np.geomspace(0.02, 0.3, 10)
    hits = 0
    for _ in range(boards):
        base = rng.lognormal(0.0, lengths_sd, prompts)
        shared = rng.normal(size=prompts)
        seconds = [
            base / s * (1 + sd * (shared + rng.normal(size=prompts)) / np.sqrt(2))
            for s, sd in zip(truth, noise, strict=True)
        ]
        board = simultaneous(base, seconds, repeats=400)
        leader = leader_of(board)
        hits += all(speedup.low <= s <= speedup.high for speedup, s in zip(board.speedups, truth, strict=True)) and all(
            d.low <= truth[leader] - truth[at] <= d.high
            for at in range(len(truth))
            if at != leader and (d := board.difference(leader, at).difference)
        )
    return hits


def test_all_intervals_of_unequal_policies_hold_at_once() -> None:
    assert boards_covered(150, 12, 0.3) >= stats.binom.ppf(0.001, 150, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [6, 12, 40, 100, 200])
@pytest.mark.parametrize("lengths_sd", [0.0, 0.3, 1.0])  # at 1.0 a tenth of the prompts takes half of the time
def test_coverage_holds_whatever_lengths_prompts_have(prompts: int, lengths_sd: float) -> None:
    assert boards_covered(1000, prompts, lengths_sd) >= stats.binom.ppf(0.001, 1000, 0.95)


def test_a_policy_5_percent_slower_is_found_on_40_prompts() -> None:
    rng = np.random.default_rng(2)
    speedups = np.r_[np.full(POLICIES - 1, 2.0), 2.0 / 1.05]
    detected = 0
    for _ in range(50):
        board = simultaneous(*seconds_of(rng, 40, speedups, np.full(POLICIES, 0.03)), repeats=400)
        detected += board.difference(leader_of(board), POLICIES - 1).significant
    assert detected >= 48


def test_the_critical_value_is_that_of_tukeys_range() -> None:
    """Many equally long prompts with independent noise: SciPy's studentised range over sqrt(2), infinite freedom."""
    rng = np.random.default_rng(0)
    arms, prompts = 6, 4000
    seconds = [1 + 0.1 * rng.normal(size=prompts) for _ in range(arms)]
    base = 2 + 0.2 * rng.normal(size=prompts)  # a seventh arm with the same relative noise
    expected = stats.studentized_range.ppf(0.95, arms + 1, 1e6) / np.sqrt(2)
    assert simultaneous(base, seconds).critical == pytest.approx(expected, rel=0.02)


def test_decisions_agree_with_scipys_tukey_hsd() -> None:
    """Independent arms of equal variance: the same pairs are called different, but for those at the limit."""
    rng = np.random.default_rng(4)
    prompts = 200
    means = np.array([1.0, 1.0, 1.02, 1.05, 1.2])
    seconds = [m + 0.1 * rng.normal(size=prompts) for m in means]
    intervals = simultaneous(np.full(prompts, 2.0), seconds)
    reference = stats.tukey_hsd(*seconds)
    for a in range(len(means)):
        for b in range(a):
            p = reference.pvalue[a, b]
            if not 0.01 < p < 0.2:
                assert intervals.difference(a, b).significant == (p < 0.05), (a, b, p)


def test_edges_of_boards() -> None:
    alone = simultaneous([3.0], [[1.0], [2.0]])
    assert not alone.difference(0, 1).significant
    base = np.array([2.0, 3.0, 4.0])
    same = simultaneous(base, [base / 2, base / 2, base])
    assert not same.difference(0, 1).significant and same.difference(0, 2).significant  # without any noise
    assert (same.speedups[0].low, same.speedups[0].high) == pytest.approx((2, 2))
    with pytest.raises(InputError, match="no sequence"):
        simultaneous([], [[]])


@pytest.mark.parametrize("lengths", [[1.0, 1.2, 0.9], [1.0, 2.0, 1.5, 3.0], [1.0, 1.1, 0.9, 1.2, 1.0, 2.0]])
def test_boards_of_few_prompts_have_scipys_quantile_at_satterthwaites_degrees(lengths: list[float]) -> None:
    base = np.array(lengths)
    seconds = [base / speedup * (1 + 0.1 * np.sin(speedup + np.arange(len(base)))) for speedup in (1.5, 2.0)]
    freedom = (base**2).sum() ** 2 / (base**4).sum() - 1
    exact = stats.t.ppf(1 - 0.025 / 3, freedom)  # Bonferroni, of three pairs
    assert exact * (1 - 1e-9) <= simultaneous(base, seconds).critical <= 1.05 * exact


@pytest.mark.parametrize("prompts", [2, 3, 6, 11])
def test_boards_of_few_prompts_cover_the_true_speedups_and_hold_no_speedup_below_0(prompts: int) -> None:
    """Drawn prompts with known speedups; where all equal the baseline, few boards call one faster or slower."""
    rng, boards = np.random.default_rng(prompts), 400
    covered, called = 0, 0
    for truth in (np.array([1.4, 2.0, 0.8]), np.ones(3)):
        for _ in range(boards):
            board = simultaneous(*seconds_of(rng, prompts, truth, np.full(3, 0.3), lengths_sd=0.5))
            assert all(speedup.low > 0 for speedup in board.speedups)
            covered += all(s.low <= true <= s.high for s, true in zip(board.speedups, truth, strict=True))
            called += truth[1] == 1 and any(
                against_baseline(speedup) != "not significant" for speedup in board.speedups
            )
    assert covered >= 0.95 * 2 * boards - 3 * np.sqrt(0.05 * 0.95 * 2 * boards)
    assert called <= MOST_FALSE * boards + 3 * np.sqrt(MOST_FALSE * boards)


TRUE_SPEEDUP = {"code": 2.0, "prose": 1.2}  # which domains differ by is no uncertainty, because both parts have both


def prompts(rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds without and with a policy of this many prompts, half of each domain, and their domains."""
    domains = np.array([*TRUE_SPEEDUP] * (number // 2))
    baseline_s = rng.uniform(0.5, 1.5, number)
    speedups = np.array([TRUE_SPEEDUP[name] for name in domains]) * rng.lognormal(0.0, 0.1, number)
    return baseline_s, baseline_s / speedups, domains


@pytest.mark.parametrize(("tuning", "held_out"), [(12, 12), (24, 6), (8, 40)])
def test_measured_speedups_lie_inside_as_often_as_said(tuning: int, held_out: int) -> None:
    rng, inside, widths = np.random.default_rng(tuning), 0, []
    runs = 1500
    for _ in range(runs):
        forecast = forecast_interval(*prompts(rng, tuning), held_out, cost_error=0.01, run_error=0.02)
        baseline_s, policy_s, _ = prompts(rng, held_out)
        off = rng.normal(0.0, 0.01) + rng.normal(0.0, 0.02)  # of the costs, and of the run
        measured = baseline_s.sum() / policy_s.sum() * np.exp(off)
        inside += forecast.low <= measured <= forecast.high
        widths.append(np.log(forecast.high / forecast))
    assert 0.93 < inside / runs < 0.98
    assert np.median(widths) < 0.25


def test_a_single_prompt_leaves_the_costs_and_the_run() -> None:
    forecast = forecast_interval(np.ones(1), np.full(1, 0.5), np.array(["all"]), 9, cost_error=0.03, run_error=0.04)
    assert forecast == 2.0 and forecast.high / 2 == pytest.approx(np.exp(1.96 * 0.05), rel=1e-4)
    with pytest.raises(InputError, match="no sequence"):
        forecast_interval(np.ones(0), np.ones(0), np.zeros(0, dtype=str), 9, cost_error=0.0, run_error=0.0)


def test_errors_are_summarised_with_their_sign() -> None:
    summary = error_summary([1.1, 0.8, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert summary.largest_percent == pytest.approx(-20) and summary.mean_percent == pytest.approx(-2.5)
    assert summary.median_abs_percent == pytest.approx(5) and summary.p90_abs_percent == pytest.approx(17)


SPEEDUP = Estimate(1.25, 1.1, 1.4)


def test_a_predicted_speedup_is_compared_formatted_and_converted() -> None:
    speedup = specsim.predict("example:lab-model", "example:lab-deep-model", "fixed_k", k=3).speedup
    assert speedup > 1.1 and not speedup > 5 and 1.0 < speedup < 2
    assert f"{speedup:.2f}" == f"{speedup.estimate:.2f}" and f"{speedup:8.3f}".strip() == f"{speedup.estimate:.3f}"
    assert float(speedup) == speedup.estimate and round(speedup, 2) == round(speedup.estimate, 2)
    assert speedup.low < speedup < speedup.high
    assert str(speedup) == f"{speedup}" == f"{speedup.estimate:.3f} [{speedup.low:.3f}, {speedup.high:.3f}]"


def test_arithmetic_is_the_number_s() -> None:
    for value, number in ((SPEEDUP - 1, 0.25), (2 * SPEEDUP, 2.5), (1 / SPEEDUP, 0.8), (SPEEDUP / SPEEDUP, 1.0)):
        assert value == number and type(value) is float
    assert math.sqrt(Estimate(4.0, 1.0, 9.0)) == 2 and max(SPEEDUP, Estimate(1.3, 0.2, 2.0)).low == 0.2
    assert sum([SPEEDUP, SPEEDUP]) == 2.5


def test_numpy_and_pandas_take_it_for_a_float() -> None:
    column = np.array([SPEEDUP, Estimate(2.0, 1.0, 3.0)])
    assert column.dtype == np.float64 and column.mean() == 1.625
    frame = pd.DataFrame({"speedup": [SPEEDUP, SPEEDUP]})
    assert frame["speedup"].dtype == np.float64 and frame["speedup"].sum() == 2.5


def test_it_equals_its_number_and_an_estimate_with_the_same_interval() -> None:
    assert SPEEDUP == 1.25 and hash(SPEEDUP) == hash(1.25) and {SPEEDUP: "x"}[1.25] == "x"
    assert SPEEDUP != 1.3 and SPEEDUP != "1.25" and SPEEDUP == 1.25
    assert Estimate(1.25, 1.1, 1.4) == SPEEDUP and Estimate(1.25, 0.0, 9.0) != SPEEDUP


def sent(value: Estimate) -> Estimate:
    """Send a value as it is sent to a worker process."""
    here, there = multiprocessing.Pipe()
    here.send(value)
    return there.recv()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, sent])
def test_copies_keep_the_interval(again) -> None:
    assert again(SPEEDUP).as_dict() == {"estimate": 1.25, "low": 1.1, "high": 1.4}


def test_its_json_form_keeps_the_interval_and_it_cannot_be_changed() -> None:
    assert json.loads(json.dumps(SPEEDUP.as_dict()))["high"] == 1.4
    with pytest.raises(AttributeError):
        SPEEDUP.low = 0.0
