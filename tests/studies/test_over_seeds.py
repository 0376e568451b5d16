"""Means over seeds with intervals over seeds and sequences."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t

from studies.training.over_seeds import linear_parts, mean_over_seeds


def test_linear_parts_have_each_seeds_ratio_as_their_mean() -> None:
    rng = np.random.default_rng(0)
    top, bottom = rng.uniform(1, 9, (3, 7)), rng.uniform(1, 9, (3, 7))
    parts = linear_parts(top, bottom)
    assert parts.mean(axis=1) == pytest.approx(top.sum(axis=1) / bottom.sum(axis=1))


def test_intervals_hold_the_truth_as_often_as_they_say_whatever_varies() -> None:
    """x_rs = seed + prompt + both, of which either may be nothing."""
    rng = np.random.default_rng(1)
    for seed_sd, prompt_sd, both_sd in ((0.0, 1.0, 0.3), (1.0, 0.0, 0.3), (1.0, 1.0, 1.0), (0.3, 1.0, 0.0)):
        held = 0
        for _ in range(1000):
            parts = rng.normal(0, seed_sd, (3, 1)) + rng.normal(0, prompt_sd, 16) + rng.normal(0, both_sd, (3, 16))
            mean = mean_over_seeds(parts)
            held += mean.low <= 0 <= mean.high
        assert held >= 930, (seed_sd, prompt_sd, both_sd)  # 950 less three standard deviations


def test_pairing_cancels_what_seeds_and_prompts_do_to_both() -> None:
    rng = np.random.default_rng(2)
    a = rng.normal(0, 1, (3, 16))
    mean = mean_over_seeds(a + 0.1 - a)
    assert mean.estimate == pytest.approx(0.1) and mean.low == pytest.approx(0.1)
    assert mean_over_seeds(a).low < -0.2


def test_reaches_over_seeds_and_over_sequences_are_added_as_squares() -> None:
    parts = np.random.default_rng(3).normal(1, 1, (4, 9))
    over_seeds, over_sequences = (
        t.ppf(0.975, values.size - 1) * values.std(ddof=1) / np.sqrt(values.size)
        for values in (parts.mean(axis=1), parts.mean(axis=0))
    )
    mean, reach = mean_over_seeds(parts), np.hypot(over_seeds, over_sequences)
    assert [mean.low, mean.estimate, mean.high] == pytest.approx(parts.mean() + reach * np.array([-1, 0, 1]))
