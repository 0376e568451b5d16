"""Bootstrap intervals over sequences: sequences are the independent units, tokens are not."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from specsim.errors import InputError


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % percentile bootstrap interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def resample(sequences: int, *, repeats: int = 2000, seed: int = 0) -> npt.NDArray[np.int64]:
    """Sequence indices [repeats, sequences], drawn with replacement."""
    return np.random.default_rng(seed).integers(0, sequences, size=(repeats, sequences))


def ratio_interval(
    numerator: npt.ArrayLike,
    denominator: npt.ArrayLike,
    *,
    repeats: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """Sum over sum of two per-sequence quantities [S], resampled together.

    The same seed resamples the same sequences, so that intervals of two policies on one
    trace are paired. Raises InputError when there is no sequence.
    """
    top, bottom = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    assert top.shape == bottom.shape, "one numerator and one denominator per sequence"
    if top.size == 0:
        raise InputError("bootstrap: no sequence; give at least one")
    index = resample(top.size, repeats=repeats, seed=seed)
    ratios = top[index].sum(axis=1) / bottom[index].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high))
