"""Latent Gaussian processes along the text, and their fit to accepted and rejected tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats, IntArray, Ints

SEQUENCE_NODES, TOKEN_STATES = 7, 15
MAX_POSITIONS = 12_000  # that the likelihood uses; enough for the shares
ROUGH_POSITIONS = 3_000
MISSING = -1
MOST_LAGS = 32
Table = tuple[float, ...]
KNOTS = np.linspace(-3.5, 3.5, 57)  # normal scores at which tables hold the quantiles of a distribution


class Drift(NamedTuple):
    """Autocorrelation of a standard Gaussian process: at lag k >= 1, sequence + local x decay^k.

    sequence : share of variance common to a whole sequence
    local : share that fades along the text
    decay : per token, in [0, 1)

    The rest of the variance is fresh at every token.
    """

    sequence: float
    local: float
    decay: float

    def draw(self, lengths: Ints, rng: np.random.Generator) -> Floats:
        """Draw a process over sequences of these lengths [S]: float64 [N], standard normal at every position."""
        from scipy.signal import lfilter

        total, longest = int(lengths.sum()), int(lengths.max())
        inside = np.arange(longest) < lengths[:, None]
        noise = rng.standard_normal((len(lengths), longest))
        noise[:, 1:] *= np.sqrt(1 - self.decay**2)
        fading = lfilter([1.0], [1.0, -self.decay], noise, axis=1)[inside]
        common = np.repeat(rng.standard_normal(len(lengths)), lengths)
        fresh = rng.standard_normal(total)
        parts = zip((self.sequence, self.local, self.fresh), (common, fading, fresh), strict=True)
        return np.asarray(sum(np.sqrt(share) * part for share, part in parts))

    @property
    def fresh(self) -> float:
        return max(0.0, 1 - self.sequence - self.local)


def fit_drift(score: Floats, lengths: IntArray) -> Drift:
    """Fit a drift by least squares to the autocorrelations of standard normal scores [N] at lags up to MOST_LAGS."""
    from scipy.optimize import least_squares

    lag = np.arange(1, min(MOST_LAGS, int(lengths.max()) - 1) + 1)
    if len(lag) < 4:
        return Drift(0.0, 0.0, 0.0)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    correlation, weight = np.zeros(len(lag)), np.zeros(len(lag))
    for i, k in enumerate(lag.tolist()):
        same = sequence[k:] == sequence[:-k]
        correlation[i] = (score[k:] * score[:-k])[same].mean()
        weight[i] = np.sqrt(same.sum())

    def misfit(x: Floats) -> Floats:
        return np.asarray(weight * (x[0] + x[1] * x[2] ** lag - correlation))

    low = max(correlation[-1], 0.0)
    start = [min(low, 0.9), float(np.clip(correlation[0] - low, 0.01, 0.9)), 0.8]
    return _bounded(*least_squares(misfit, start, bounds=([0, 0, 0], [0.98, 0.98, 0.995])).x)


def fit_hidden(offset: Floats, accepted: npt.NDArray[np.int8]) -> Drift:
    """Fit the drift of a standard Gaussian z with accepted = [offset + z > 0] by maximum likelihood.

    offset : float64 [S, T], so that the probability of acceptance is Phi(offset) if nothing else is known
    accepted : int8 [S, T], 1, 0, or MISSING, which is ignored

    The likelihood is that of a hidden Markov chain: the sequence's share on Gauss-Hermite
    nodes, the fading share as Rouwenhorst's chain (1995), which has the AR(1) process's
    autocorrelation exactly. Outcomes must be missing at random, given the others.
    """
    from scipy.optimize import minimize

    def search(start: Floats, positions: int, step: float) -> Any:
        keep = max(1, positions // max(1, accepted.shape[1]))

        def loss(x: Floats) -> float:
            return -log_likelihood(_from_free(x), offset[:keep], accepted[:keep])

        simplex = np.vstack([start, start + step * np.eye(3)])
        options = {"xatol": 0.05, "fatol": 0.02, "initial_simplex": simplex}
        return minimize(loss, start, method="Nelder-Mead", options=options)

    # Differences between sequences and between stretches of text are two local minima: search both on less data.
    starts = np.array([-1.0, 0.0, 1.0]), np.array([-2.0, -2.0, 2.5])
    rough = min((search(start, ROUGH_POSITIONS, 1.0) for start in starts), key=lambda result: result.fun)
    best = search(rough.x, MAX_POSITIONS, 0.3)
    keep = max(1, MAX_POSITIONS // max(1, accepted.shape[1]))
    nothing = Drift(0.0, 0.0, 0.0)
    # Three parameters have to improve the likelihood by more than chance does.
    if -log_likelihood(nothing, offset[:keep], accepted[:keep]) <= best.fun + 3.0:
        return nothing
    return _from_free(best.x)


def fit_mean(drift: Drift, accepted: npt.NDArray[np.int8]) -> float:
    """Fit the constant offset of these outcomes under this drift by maximum likelihood; see `fit_hidden`."""
    from scipy.optimize import minimize_scalar

    accepted = accepted[: max(1, MAX_POSITIONS // max(1, accepted.shape[1]))]

    def loss(mean: float) -> float:
        return -log_likelihood(drift, np.full(accepted.shape, mean), accepted)

    return float(minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 0.01}).x)


def _from_free(x: Floats) -> Drift:
    """Drift from three logits: share of all drift, the sequence's part of it, decay."""
    total, split, decay = 1 / (1 + np.exp(-np.clip(x, -12, 12)))
    return _bounded(total * split, total * (1 - split), decay)


def _bounded(sequence: float, local: float, decay: float) -> Drift:
    shrink = min(1.0, 0.98 / max(sequence + local, 1e-12))
    return Drift(float(sequence * shrink), float(local * shrink), float(min(decay, 0.995)))


def log_likelihood(drift: Drift, offset: Floats, accepted: npt.NDArray[np.int8]) -> float:
    """Log-likelihood of accepted and rejected tokens, in nats; see `fit_hidden`."""
    from scipy.special import ndtr

    nodes, weights = np.polynomial.hermite_e.hermegauss(SEQUENCE_NODES)
    weights = weights / weights.sum()
    states, chain, stationary = _rouwenhorst(drift.decay)
    level = np.sqrt(drift.sequence) * nodes[:, None] + np.sqrt(drift.local) * states  # [Q, G]
    scale = np.sqrt(drift.fresh)
    belief = np.broadcast_to(stationary, (len(accepted), SEQUENCE_NODES, TOKEN_STATES)).copy()
    total = np.zeros((len(accepted), SEQUENCE_NODES))
    for t in range(accepted.shape[1]):
        if t > 0:
            belief = belief @ chain
        sign = np.where(accepted[:, t] == 1, 1.0, -1.0)[:, None, None]
        prob = ndtr(sign * (offset[:, t, None, None] + level) / scale)
        prob[accepted[:, t] == MISSING] = 1.0
        belief *= prob
        norm = np.maximum(belief.sum(axis=2), 1e-300)
        total += np.log(norm)
        belief /= norm[:, :, None]
    peak = total.max(axis=1)
    return float((peak + np.log(np.exp(total - peak[:, None]) @ weights)).sum())


def _rouwenhorst(decay: float) -> tuple[Floats, Floats, Floats]:
    """States [G], transition matrix [G, G] and stationary distribution [G] of Rouwenhorst's chain for an AR(1)."""
    p = (1 + decay) / 2
    chain = np.array([[p, 1 - p], [1 - p, p]])
    for n in range(3, TOKEN_STATES + 1):
        larger = np.zeros((n, n))
        larger[:-1, :-1] += p * chain
        larger[:-1, 1:] += (1 - p) * chain
        larger[1:, :-1] += (1 - p) * chain
        larger[1:, 1:] += p * chain
        larger[1:-1] /= 2
        chain = larger
    states = np.linspace(-1, 1, TOKEN_STATES) * np.sqrt(TOKEN_STATES - 1)
    stationary = np.array([1.0])
    for _ in range(TOKEN_STATES - 1):
        stationary = np.convolve(stationary, [0.5, 0.5])
    return states, chain, stationary
