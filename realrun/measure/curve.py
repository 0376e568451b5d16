"""Fit a cost, as a function of context, to the seconds of rounds at whatever contexts they met."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specsim.io.arrays import Floats

Point = tuple[int, float]  # context in tokens, seconds

CURVATURE = 4.0  # samples that a bend of the curve must be worth
TILT = 1e-3  # keeps a curve flat if all samples have the same context
FAR = 4.0  # spreads from the curve at which a sample no longer counts for more
ITERATIONS = 8


def along_contexts(points: Sequence[Point], grid: Sequence[int], q: float | None = None) -> Floats:
    """Fit seconds at the contexts of a grid, [C]; the curve is linear between them.

    The fit is least squares, so that fitted and measured seconds have the same sum. An outlier counts as a sample FAR
    spreads away from the curve (Huber's estimate, spread by the median absolute deviation). The bend at a node is
    penalised, so that few samples give a line. The curve stays above half the fastest sample because a line tilted by
    noise could become negative.

    Parameters
    ----------
    points : sequence of (context in tokens, seconds), not empty
    grid : contexts in tokens, increasing
    q : shift the curve so that this share of the samples lies below it
    """
    context, seconds = np.array(points, dtype=np.float64).T
    hats = hat_functions(context, grid)
    bends, tilts = bends_of(grid), np.diff(np.eye(len(grid)), axis=0)
    normal = hats.T @ hats + CURVATURE * bends.T @ bends + TILT * tilts.T @ tilts
    near, values = seconds, np.zeros(len(grid))
    for _ in range(ITERATIONS):
        values = np.linalg.solve(normal, hats.T @ near)
        fitted = hats @ values
        reach = FAR * spread(seconds - fitted)
        near = fitted + np.clip(seconds - fitted, -reach, reach)
    if q is not None:
        values = values + np.quantile(seconds - hats @ values, q)
    fastest = seconds.min()
    return np.maximum(values, fastest - abs(fastest) / 2)


def centre(seconds: Sequence[float], q: float | None = None) -> float:
    """Fit `along_contexts` to samples that do not depend on the context."""
    return float(along_contexts([(0, value) for value in seconds], [0], q)[0])


def spread(residuals: Floats) -> float:
    """Estimate the standard deviation of normal residuals from their median absolute value."""
    return float(1.4826 * np.median(np.abs(residuals)))


def hat_functions(context: Floats, grid: Sequence[int]) -> Floats:
    """Compute the weights [n, C] that interpolate values at the grid's contexts to these contexts [n]."""
    return np.stack([np.interp(context, grid, row) for row in np.eye(len(grid))], axis=1)


def bends_of(grid: Sequence[int]) -> Floats:
    """Make the operator [C - 2, C] that maps values on the grid to twice their distance below the neighbours' line."""
    gaps = np.diff(np.array(grid, dtype=np.float64))[:, None]
    before, after = gaps[:-1], gaps[1:]
    return np.asarray(
        np.diff(np.diff(np.eye(len(grid)), axis=0) / gaps, axis=0) * 2 * before * after / (before + after)
    )
