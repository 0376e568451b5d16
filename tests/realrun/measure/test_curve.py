"""Costs along contexts: lines found as they are, sums kept, interruptions bounded, few samples enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from realrun.measure.curve import FAR, along_contexts, centre, half_width, hat_functions, influences, spread
from realrun.measure.profile import LEAST_SWEEPS

GRID = [10, 20, 40, 100]
grids = st.sets(st.integers(0, 500), min_size=1, max_size=5).map(sorted)
seconds = st.floats(0.5, 1.5)


def points_on(curve: dict[int, float], repeats: int) -> list[tuple[int, float]]:
    """Samples at every context from the first of the grid to its last, all on the curve."""
    grid, values = list(curve), list(curve.values())
    return [(c, float(np.interp(c, grid, values))) for c in range(grid[0], grid[-1] + 1)] * repeats


@given(grid=grids, at_first=st.floats(0.1, 1.0), at_last=st.floats(0.1, 1.0), repeats=st.integers(1, 3))
def test_a_line_is_found_as_it_is(grid: list[int], at_first: float, at_last: float, repeats: int) -> None:
    """But for the tilt, which counts for less than a hundredth of a sample."""
    line = np.interp(grid, [grid[0], grid[-1]], [at_first, at_last]) if len(grid) > 1 else np.array([at_first])
    curve = along_contexts(points_on(dict(zip(grid, line.tolist(), strict=True)), repeats), grid)
    np.testing.assert_allclose(curve, line, atol=5e-3)


@settings(max_examples=10)
@given(values=st.lists(seconds, min_size=4, max_size=4), q=st.sampled_from([None, 0.25, 0.5, 0.75]))
def test_many_samples_on_the_grid_outweigh_the_penalties(values: list[float], q: float | None) -> None:
    """Of n samples at each node, what the curve misses is the share of the penalties in n."""
    points = [(c, s) for c, s in zip(GRID, values, strict=True) for _ in range(20_000)]
    np.testing.assert_allclose(along_contexts(points, GRID, q), values, atol=5e-3)


@given(grid=grids, samples=st.lists(st.tuples(st.integers(0, 500), seconds), min_size=1, max_size=40))
def test_the_curve_gives_the_rounds_it_was_fitted_to_as_much_as_they_took(
    grid: list[int], samples: list[tuple[int, float]]
) -> None:
    """In sum, where none lies far from the curve and no bound is reached."""
    contexts, took_s = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    values = along_contexts(samples, grid)
    fitted = hat_functions(contexts, grid) @ values
    far = FAR * spread(took_s - fitted)
    assume((np.abs(took_s - fitted) < 0.9 * far).all() or np.allclose(took_s, fitted, atol=1e-12))
    assume(values.min() > took_s.min() / 2)
    assert fitted.sum() == pytest.approx(took_s.sum(), rel=1e-2)


@pytest.mark.parametrize("late_s", [10.0, 1e3, 1e6])
def test_an_interruption_counts_for_no_more_than_a_few_spreads(late_s: float) -> None:
    rng = np.random.default_rng(0)
    points = [(int(c), float(s)) for c, s in zip(rng.integers(10, 101, 200), rng.normal(1, 0.05, 200), strict=True)]
    undisturbed = along_contexts(points, GRID)
    interrupted = along_contexts([*points, (40, 1.0 + late_s)], GRID)
    near = hat_functions(np.array([40.0]), GRID)[0] > 0
    assert np.abs(interrupted - undisturbed)[near].max() < FAR * 0.05 / 10
    assert (interrupted >= undisturbed - 1e-2).all()


@given(context=st.integers(0, 500), values=st.lists(seconds, min_size=1, max_size=9), grid=grids)
def test_samples_of_one_context_give_a_flat_curve(context: int, values: list[float], grid: list[int]) -> None:
    """Few as they may be: the penalties alone decide what lies elsewhere."""
    curve = along_contexts([(context, value) for value in values], grid)
    assert min(values) - 1e-9 <= curve.min() and curve.max() <= max(values) + 1e-9
    assert np.ptp(curve) < 1e-9


def test_two_samples_give_a_line() -> None:
    curve = along_contexts([(10, 1.0), (100, 2.0)], GRID)
    np.testing.assert_allclose(curve, np.interp(GRID, [10, 100], [1, 2]), atol=1e-3)
    assert (np.diff(curve) > 0).all()


def test_no_curve_leads_below_half_the_fastest_sample() -> None:
    steep = [(80, 1.0), (81, 1.1), (82, 1.2)] * 30  # the line through them is negative at 10 tokens
    assert along_contexts(steep, GRID)[0] == pytest.approx(0.5)
    assert along_contexts([(c, -s) for c, s in steep], GRID).min() >= -1.8  # differences may be negative
    for q in (None, 0.25, 0.5, 0.75):
        assert along_contexts(steep, GRID, q).min() > 0


@given(values=st.lists(seconds, min_size=1, max_size=30))
def test_quantiles_keep_the_curves_shape_and_their_order(values: list[float]) -> None:
    points = list(zip([10, 35, 90] * 10, values, strict=False))
    mean, low, middle, high = (along_contexts(points, GRID, q) for q in (None, 0.25, 0.5, 0.75))
    assert (low <= middle).all() and (middle <= high).all()
    if low.min() > min(values) / 2:
        for curve in (low, middle, high):
            assert np.ptp(curve - mean) < 1e-9 or mean.min() <= min(values) / 2 + 1e-12
    hats = hat_functions(np.array([c for c, _ in points], dtype=np.float64), GRID)
    took_s = np.array([s for _, s in points])
    assert (took_s <= hats @ middle + 1e-9).mean() >= 0.5 and (took_s >= hats @ middle - 1e-9).mean() >= 0.5


@given(values=st.lists(seconds, min_size=1, max_size=30))
def test_the_centre_of_what_lies_close_is_its_mean(values: list[float]) -> None:
    residuals = np.array(values) - np.mean(values)
    middle = centre(values)
    assert min(values) - 1e-9 <= middle <= max(values) + 1e-9
    if np.abs(residuals).max() <= FAR * spread(residuals):
        assert middle == pytest.approx(np.mean(values))
    assert centre(values, 0.5) == pytest.approx(np.median(values))


@given(contexts=st.lists(st.integers(0, 500), min_size=1, max_size=9), grid=grids)
def test_hat_functions_interpolate(contexts: list[int], grid: list[int]) -> None:
    hats = hat_functions(np.array(contexts, dtype=np.float64), grid)
    assert hats.shape == (len(contexts), len(grid)) and (hats >= 0).all()
    np.testing.assert_allclose(hats.sum(axis=1), 1)
    np.testing.assert_allclose(hats @ np.array(grid), np.clip(contexts, grid[0], grid[-1]), atol=1e-9)


def drawn_sweep(rng: np.random.Generator, true: np.ndarray[Any, Any], heavy: bool) -> list[tuple[int, float]]:
    """Samples of every context, three of each: 3 % noise of their own, 2 % of the sweep, which all have in common."""
    common, points = rng.normal(0.0, 0.02), []
    for context, seconds in zip(GRID, true.tolist(), strict=True):
        for _ in range(3):
            own = rng.normal(0.0, 0.03) + heavy * (rng.random() < 0.1) * rng.normal(0.0, 0.4)
            points.append((context, seconds * (1 + common + own)))
    return points


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("sweeps", [3, 5, 20])
def test_intervals_of_correlated_samples_cover_the_truth(sweeps: int, heavy: bool) -> None:
    """Taken to be independent, the three samples of a sweep would give intervals that cover 80 % of the time."""
    rng, true = np.random.default_rng(sweeps), np.array([1.0, 1.1, 1.3, 1.6])
    covered = []
    for _ in range(300):
        means = influences([drawn_sweep(rng, true, heavy) for _ in range(sweeps)], GRID)
        covered.append(np.abs(means.values - true) <= means.relative_half_width * means.values)
    assert 0.92 < np.mean(covered) < 0.985


def test_intervals_cover_the_truth_where_they_decide_when_to_stop() -> None:
    """Stopping as soon as all intervals are narrow prefers sweeps that happen to be alike."""
    rng, true, covered = np.random.default_rng(4), np.array([1.0, 1.1, 1.3, 1.6]), []
    for _ in range(100):
        sweeps = [drawn_sweep(rng, true, False) for _ in range(LEAST_SWEEPS)]
        while (means := influences(sweeps, GRID)).relative_half_width.max() > 0.02:
            sweeps.append(drawn_sweep(rng, true, False))
        covered.append(np.abs(means.values - true) <= means.relative_half_width * means.values)
    assert np.mean(covered) > 0.9


def test_a_sum_of_times_has_the_interval_of_its_sweeps_sums() -> None:
    """Against scipy's interval of the mean over sweeps: what all parts have in common does not average out."""
    rng = np.random.default_rng(0)
    parts = [[[(10, float(s))] for s in 1 + 0.1 * n + rng.normal(0, 0.01, 12)] for n in range(3)]
    means = [influences(sweeps, [10]) for sweeps in parts]
    sums = np.sum([[sweep[0][1] for sweep in sweeps] for sweeps in parts], axis=0)
    low, high = stats.t.interval(0.95, 11, sums.mean(), stats.sem(sums))
    assert sum(mean.values[0] for mean in means) == pytest.approx(sums.mean(), rel=1e-6)
    assert half_width(np.sum([mean.moved for mean in means], axis=0)[:, 0]) == pytest.approx((high - low) / 2, rel=1e-6)


def test_a_single_sweep_has_no_interval() -> None:
    means = influences([[(10, 1.0), (20, 2.0)], [(10, 1.1)]], [10, 20])
    assert np.isnan(means.relative_half_width).tolist() == [False, True]
