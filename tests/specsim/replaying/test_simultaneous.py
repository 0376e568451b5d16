"""Intervals of a board hold all at once: equal policies are rarely called different, real differences are found."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specsim.io.errors import InputError
from specsim.replaying.intervals import paired_difference
from specsim.replaying.simultaneous import Simultaneous, simultaneous

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


def covered(boards: int, prompts: int, lengths_sd: float, seed: int = 0) -> int:
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
    assert covered(150, 12, 0.3) >= stats.binom.ppf(0.001, 150, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [6, 12, 40, 100, 200])
@pytest.mark.parametrize("lengths_sd", [0.0, 0.3, 1.0])  # at 1.0 a tenth of the prompts takes half of the time
def test_coverage_holds_whatever_lengths_prompts_have(prompts: int, lengths_sd: float) -> None:
    assert covered(1000, prompts, lengths_sd) >= stats.binom.ppf(0.001, 1000, 0.95)


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


def test_edges() -> None:
    alone = simultaneous([3.0], [[1.0], [2.0]])
    assert not alone.difference(0, 1).significant
    base = np.array([2.0, 3.0, 4.0])
    same = simultaneous(base, [base / 2, base / 2, base])
    assert not same.difference(0, 1).significant and same.difference(0, 2).significant  # without any noise
    assert (same.speedups[0].low, same.speedups[0].high) == pytest.approx((2, 2))
    with pytest.raises(InputError, match="no sequence"):
        simultaneous([], [[]])
