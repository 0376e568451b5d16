"""Fit a cost, as a function of context, to the seconds of rounds at whatever contexts they met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from specsim.io.arrays import Floats

Point = tuple[int, float]  # context in tokens, seconds

CURVATURE = 4.0  # samples that a bend of the curve must be worth
TILT = 1e-3  # keeps a curve flat if all samples have the same context
FAR = 4.0  # spreads from the curve at which a sample no longer counts for more
ITERATIONS = 8


def along_contexts(points: Sequence[Point], grid: Sequence[int], q: float | None = None) -> Floats:
    """Fit seconds at the contexts of a grid, [C]; the curve is linear between them.

    The fit is least squares, so that fitted and measured seconds have the same sum. An outlier counts as a sample FAR
    spreads away from the curve (Huber's estimate, spread by the median absolute deviation). Unless every node has
    samples, and no context lies between nodes, the bend at a node is penalised, so that few samples give a line. The
    curve stays above half the fastest sample because a line tilted by noise could become negative.

    Parameters
    ----------
    points : sequence of (context in tokens, seconds), not empty
    grid : contexts in tokens, increasing
    q : shift the curve so that this share of the samples lies below it
    """
    context, seconds = np.array(points, dtype=np.float64).T
    fit = _fit(context, seconds, grid)
    values = fit.values
    if q is not None:
        values = values + np.quantile(seconds - fit.hats @ values, q)
    fastest = seconds.min()
    return np.maximum(values, fastest - abs(fastest) / 2)


class Fit(NamedTuple):
    """A robust curve through samples.

    values : seconds at the grid [C]; hats : weights [n, C] that interpolate them to the samples
    penalty : [C, C], added to the normal matrix; reach : seconds from the curve beyond which samples are outliers
    """

    values: Floats
    hats: Floats
    penalty: Floats
    reach: float


def _fit(context: Floats, seconds: Floats, grid: Sequence[int]) -> Fit:
    hats = hat_functions(context, grid)
    bends, tilts = bends_of(grid), np.diff(np.eye(len(grid)), axis=0)
    sampled = np.isin(context, grid).all() and np.isin(grid, context).all()  # every node has samples of its own
    penalty = (0.0 if sampled else CURVATURE) * bends.T @ bends + TILT * tilts.T @ tilts
    values: Floats = np.zeros(len(grid))
    residuals, reach = seconds, np.inf
    for _ in range(ITERATIONS):
        near = hats @ values + np.clip(residuals, -reach, reach)
        values = np.asarray(np.linalg.solve(hats.T @ hats + penalty, hats.T @ near), dtype=np.float64)
        residuals = seconds - hats @ values
        reach = FAR * spread(residuals)
    return Fit(values, hats, penalty, reach)


class Influences(NamedTuple):
    """How much each sweep moves a robust curve, from which its errors follow, those of sums of curves included.

    values : seconds at the grid [C]; moved : seconds by which a sweep moves them [G, C], NaN where it has no samples
    """

    values: Floats
    moved: Floats

    @property
    def relative_half_width(self) -> Floats:
        """Compute the half-width of each value's 95 % interval, relative to it [C]; NaN for fewer than 2 sweeps."""
        return np.array([half_width(moved) for moved in self.moved.T]) / self.values


def influences(sweeps: Sequence[Sequence[Point]], grid: Sequence[int]) -> Influences:
    """Compute how much each sweep moves the curve `along_contexts` of all samples.

    Samples of one sweep may be correlated, those of different sweeps are taken to be independent (a cluster-robust
    variance; Liang and Zeger 1986, Biometrika 73). Outliers count as Huber's estimate counts them.

    Parameters
    ----------
    sweeps : samples (context in tokens, seconds) of every sweep; contexts are the grid's
    grid : contexts in tokens, increasing
    """
    context, seconds = np.array([point for points in sweeps for point in points], dtype=np.float64).T
    fit = _fit(context, seconds, grid)
    residuals = seconds - fit.hats @ fit.values
    inside = fit.hats[np.abs(residuals) <= fit.reach]
    pulls = fit.hats * np.clip(residuals, -fit.reach, fit.reach)[:, None]
    pull = np.linalg.solve(inside.T @ inside + fit.penalty, pulls.T)
    # A neighbouring context moves a value by the penalty only; it does not count as a sweep of this context.
    here = np.array([np.isin(grid, [at for at, _ in points]) for points in sweeps])
    ends = np.cumsum([len(points) for points in sweeps])
    moved = np.stack([part.sum(axis=1) for part in np.split(pull, ends[:-1], axis=1)])
    return Influences(fit.values, np.where(here, moved, np.nan))


def half_width(moved: Floats) -> float:
    """Compute the half-width of the 95 % interval of an estimate that sweeps move by `moved` [G]; NaN for one sweep."""
    sweeps = int(np.count_nonzero(~np.isnan(moved)))
    if sweeps < 2:
        return math.nan
    return float(stdtrit(sweeps - 1, 0.975) * np.sqrt(sweeps / (sweeps - 1) * np.nansum(moved**2)))


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
