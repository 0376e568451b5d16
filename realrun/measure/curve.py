"""A cost as a function of context, fitted to what rounds took at the contexts that they happened to meet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specsim.io.arrays import Floats

Point = tuple[int, float]  # context in tokens, seconds

CURVATURE = 4.0  # samples that a bend of the curve must be worth
TILT = 1e-3  # keeps a curve flat where all samples have one context
FAR = 4.0  # spreads from the curve at which a sample no longer counts for more
ITERATIONS = 8


def along_contexts(points: Sequence[Point], grid: Sequence[int], q: float | None = None) -> Floats:
    """Seconds at the contexts of a grid [C], between which the curve is linear.

    Least squares, so that what the curve gives for the rounds that it was fitted to sums to what they took; a round
    that was interrupted counts as one FAR spreads away (Huber's estimate, spread by the median absolute deviation).
    The bend at a node is penalised, so that few samples give a line. No line leads below half the fastest sample: a
    time is positive wherever noise would tilt it to.

    Parameters
    ----------
    points : sequence of (context in tokens, seconds), not empty
    grid : contexts in tokens, increasing
    q : give the curve that this share of the samples lies below, of the same shape
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
    """`along_contexts` of what does not depend on the context."""
    return float(along_contexts([(0, value) for value in seconds], [0], q)[0])


def spread(residuals: Floats) -> float:
    """The standard deviation that a normal sample of this median absolute residual would have."""
    return float(1.4826 * np.median(np.abs(residuals)))


def hat_functions(context: Floats, grid: Sequence[int]) -> Floats:
    """[n, C], the weights by which values at the grid's contexts are interpolated at these [n]."""
    return np.stack([np.interp(context, grid, row) for row in np.eye(len(grid))], axis=1)


def bends_of(grid: Sequence[int]) -> Floats:
    """[C - 2, C], of values at the grid's contexts: twice what the line through a node's neighbours has above it."""
    gaps = np.diff(np.array(grid, dtype=np.float64))[:, None]
    before, after = gaps[:-1], gaps[1:]
    return np.asarray(
        np.diff(np.diff(np.eye(len(grid)), axis=0) / gaps, axis=0) * 2 * before * after / (before + after)
    )
