"""AdaEDL's score 1 - sqrt(gamma H) against what it is said to bound from below, the acceptance probability 1 - TVD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from specsim.acceptance.formulas import adaedl_score, leviathan_speedup
from specsim.io.arrays import FloatArray, Floats, IntArray, Ints
from specsim.replaying.intervals import Estimate, ratio_interval, resample, tails


@dataclass(frozen=True)
class Signals:
    """Every position [N] of the outputs, after the text before it.

    sequence : int, the prompt's index
    entropy_nats, confidence : of the distribution of the first drafted token
    acceptance : how likely that token is accepted; 1 - TVD(draft, target) where the drafter samples it
    """

    sequence: IntArray
    entropy_nats: FloatArray
    confidence: FloatArray
    acceptance: FloatArray

    def of(self, sequences: IntArray) -> Signals:
        """The positions of these prompts."""
        rows = np.isin(self.sequence, sequences)
        return Signals(*(getattr(self, field.name)[rows] for field in fields(self)))


def bounding_gamma(signals: Signals, share: float) -> float:
    """The least gamma whose score exceeds the acceptance probability at no more than 1 - share of the positions."""
    squared = (1 - signals.acceptance) ** 2
    needed = np.divide(squared, signals.entropy_nats, out=np.full(len(squared), np.inf), where=signals.entropy_nats > 0)
    return float(np.quantile(needed, share, method="higher"))


def _summed(values: npt.ArrayLike, signals: Signals) -> Floats:
    """Sums per prompt that has positions."""
    _, which = np.unique(signals.sequence, return_inverse=True)
    return np.bincount(which, weights=np.asarray(values, dtype=np.float64)).astype(np.float64)


def violated(signals: Signals, gamma: float) -> Estimate:
    """Share of positions where the score exceeds the acceptance probability, in percent; its interval over prompts."""
    above = adaedl_score(signals.entropy_nats, gamma) > signals.acceptance
    return ratio_interval(_summed(100.0 * above, signals), _summed(np.ones(len(above)), signals))


def correlations(signals: Signals, *, repeats: int = 2000) -> tuple[Estimate, Estimate]:
    """Pearson's correlation with the acceptance probability, of the score and of confidence; intervals over prompts.

    That of the score is the same for every gamma, as the score is linear in sqrt(H).
    """
    prompts = len(np.unique(signals.sequence))
    index = np.concatenate([np.arange(prompts)[None], resample(prompts, repeats=repeats)])
    estimates = []
    for column in (-np.sqrt(signals.entropy_nats), signals.confidence):
        values = _pearson(column, signals.acceptance, signals, index)
        low, high = np.quantile(values[1:], tails(prompts, 0.95))
        estimates.append(Estimate(float(values[0]), float(low), float(high)))
    return estimates[0], estimates[1]


def _pearson(x: FloatArray, y: FloatArray, signals: Signals, index: Ints) -> Floats:
    """The correlation over each choice of prompts, index [R, S]."""
    n, sx, sy, sxx, syy, sxy = (
        _summed(values, signals)[index].sum(axis=1) for values in (np.ones(len(x)), x, y, x * x, y * y, x * y)
    )
    return np.asarray((n * sxy - sx * sy) / np.sqrt((n * sxx - sx**2) * (n * syy - sy**2)))


def paper_ratio(autoregressive: Sequence[float], base_spd: Mapping[str, Sequence[float]]) -> tuple[float, Floats]:
    """s_d / s_t, and the acceptance of each data set, that explain the paper's rates of fixed draft lengths best.

    By independent acceptance (Leviathan et al. 2023, Theorem 3.8), in least squares of log speedups.

    autoregressive : tokens/s by data set; base_spd : the same by draft length
    """
    from scipy.optimize import least_squares

    lengths = np.array([[int(length)] for length in base_spd])
    speedups = np.array(list(base_spd.values())) / np.array(autoregressive)

    def misfit(x: Floats) -> Floats:
        return np.log(leviathan_speedup(x[1:], lengths, x[0]) / speedups).ravel()

    start = np.array([0.05, *[0.6] * speedups.shape[1]])
    found = least_squares(misfit, start, bounds=(1e-6, 1 - 1e-6)).x
    return float(found[0]), found[1:]
