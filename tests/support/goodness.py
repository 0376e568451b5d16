"""Goodness of fit: acceptance statistics of a trace, compared with those of generated traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.acceptance.formulas import reliability
from specsim.acceptance.generate import generate
from specsim.acceptance.models import AcceptanceModel
from specsim.io.arrays import Bools, Floats
from specsim.trace.trace import Trace

LAGS = (1, 2, 4, 8, 16)
MAX_CELLS = 20_000_000  # drafted tokens over all generated traces


@dataclass(frozen=True)
class Statistic:
    """Statistic of the trace, and its mean and 95 % range over generated traces of the same size."""

    name: str
    observed: float
    model: float
    low: float
    high: float

    @property
    def fits(self) -> bool:
        """Whether the observed value lies in the model's range."""
        return bool(self.low <= self.observed <= self.high)


@dataclass(frozen=True)
class FitReport:
    """Comparison of a model's traces with a recorded trace.

    accepted_length : shares of match lengths 0..D of the recorded trace
    total_variation : half the sum of their absolute differences to the model's, in [0, 1]
    total_variation_noise : 95th percentile of that distance for traces of the model itself
    statistics : tokens, autocorrelations of the match length, calibration
    """

    accepted_length: list[float]
    total_variation: float
    total_variation_noise: float
    statistics: list[Statistic]


def fit_report(model: AcceptanceModel, trace: Trace, *, replicates: int) -> FitReport:
    """Compare a trace with generated traces of the same lengths and depth (a parametric bootstrap).

    Neighbouring positions share tokens, so a chi-square test of their counts would be wrong;
    ranges over generated traces account for that. Only the first sequences of long traces
    are used.
    """
    cells = np.cumsum(trace.output_tokens) * trace.depth * replicates
    trace = trace.select(np.arange(max(1, int((cells <= MAX_CELLS).sum()))))
    observed = summary(trace)
    drawn = [
        summary(generate(model, trace.sequences, trace.output_tokens, trace.depth, number))
        for number in range(replicates)
    ]
    shares = np.array([generated.pop("shares") for generated in drawn])
    mean = shares.mean(axis=0)
    own = observed.pop("shares")
    others = (shares.sum(axis=0) - shares) / (replicates - 1)  # leave-one-out means
    noise = np.abs(shares - others).sum(axis=1) / 2
    statistics = []
    for name, value in observed.items():
        values = np.array([generated[name] for generated in drawn])
        low, high = np.quantile(values, [0.025, 0.975], method="weibull")  # prediction interval of another such trace
        statistics.append(Statistic(name, float(value), float(values.mean()), float(low), float(high)))
    return FitReport(
        accepted_length=own.tolist(),
        total_variation=float(np.abs(own - mean).sum() / 2),
        total_variation_noise=float(np.quantile(noise, 0.95, method="weibull")),
        statistics=statistics,
    )


def summary(trace: Trace) -> dict[str, Any]:
    """Statistics of a trace: shares of match lengths [D + 1] under "shares", and numbers by name.

    Match lengths are limited to `draft_limit`.
    """
    match = np.minimum(trace.match_len, trace.draft_limit).astype(np.float64)
    result: dict[str, Any] = {
        "shares": np.bincount(match.astype(np.int64), minlength=trace.depth + 1) / len(match),
        "mean match length": match.mean(),
        "first token accepted": (match > 0).mean(),
        "spread of acceptance over sequences": _sequence_means(match > 0, trace).std(),
    }
    sequence = np.repeat(np.arange(trace.sequences), trace.output_tokens)
    for lag in LAGS:
        if lag < trace.output_tokens.max():
            same = sequence[lag:] == sequence[:-lag]
            result[f"autocorrelation of match length, lag {lag}"] = _correlation(match[lag:][same], match[:-lag][same])
    depth = np.arange(trace.depth)
    verified = (depth <= trace.match_len[:, None]) & (depth < trace.draft_limit[:, None])
    accepted = (depth < trace.match_len[:, None])[verified]
    if accepted.size:
        confidence, entropy = trace.confidence[verified], trace.entropy_nats[verified]
        result["calibration error (ECE) of confidence"] = reliability(confidence, accepted).ece
        for name, values in (("confidence", confidence), ("entropy", entropy)):
            for kind, chosen in (("accepted", accepted), ("rejected", ~accepted)):
                if chosen.any():
                    result[f"mean {name} of {kind} tokens"] = values[chosen].mean(dtype=np.float64)
    return result


def _sequence_means(value: Bools, trace: Trace) -> Floats:
    some = trace.output_tokens > 0
    return np.asarray(np.add.reduceat(value.astype(np.float64), trace.offsets[:-1][some]) / trace.output_tokens[some])


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    below = np.sqrt((x * x).mean() * (y * y).mean())
    return float((x * y).mean() / below) if below > 0 else 0.0
