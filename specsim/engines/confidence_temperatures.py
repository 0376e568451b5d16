"""Temperatures under which a drafter's confidence is the probability of acceptance, for each draft position.

DSpark's sequential temperature scaling (STS), whose file SGLang and TensorRT-LLM read: a confidence c = 1 / (1 + e^-z)
at place i becomes 1 / (1 + e^(-z / T_i)), and a draft's first i tokens survive with the product of theirs. Engines fit
each temperature by a grid search for the least calibration error of these products. Difference: here it is the
temperature of maximum likelihood for the tokens verified at its place, which needs neither bins nor earlier places.

References: Guo et al. 2017, arXiv:1706.04599 (temperature scaling); DSpark, arXiv:2607.05147.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specsim.acceptance.formulas import reliability
from specsim.acceptance.sources import longest_starts
from specsim.io.arrays import Bools, Floats
from specsim.io.errors import InputError
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

BINS = 15  # of the calibration error, as engines have it
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.1, 10.0  # those that engines try
LEAST_PROB = 1e-6  # a confidence is kept off 0 and 1, whose logits are infinite


class Temperatures(NamedTuple):
    """Fitted temperatures of K draft positions.

    temperatures : [K]
    rounds : they are fitted to, of K drafted tokens each time
    ece_before, ece_after : expected calibration error [K] of the probability that the first i tokens are accepted,
        with the confidence as it is, and under temperatures of other sequences
    """

    temperatures: Floats
    rounds: int
    ece_before: Floats
    ece_after: Floats

    def as_dict(self, dataset: str) -> dict[str, Any]:
        """The engines' file."""
        return {
            "temperatures": self.temperatures.round(6).tolist(),
            "dataset": dataset,
            "num_samples": self.rounds,
            "ece_before": self.ece_before.round(6).tolist(),
            "ece_after": self.ece_after.round(6).tolist(),
        }


class Drafts(NamedTuple):
    """Drafts of R rounds, up to K tokens each: logits of confidence, drafted, accepted, all [R, K]."""

    logit: Floats
    drafted: Bools
    accepted: Bools

    def select(self, rounds: Bools) -> Drafts:
        return Drafts(self.logit[rounds], self.drafted[rounds], self.accepted[rounds])

    @property
    def verified(self) -> Bools:
        """Drafted, and all before it accepted."""
        before = np.ones((len(self.accepted), 1), dtype=bool)
        return self.drafted & np.concatenate([before, self.accepted[:, :-1]], axis=1)


def confidence_temperatures(trace: Trace, k: int) -> Temperatures:
    """Fit the temperatures of drafts of K tokens.

    trace : with the drafter's confidence. Rounds are those that draft K tokens every time
    k : draft length

    Temperatures are fitted to all sequences; calibration errors are of each half of them under the other half's.

    Raises InputError if the trace is less deep, has no confidence, or too few rounds or sequences.
    """
    trace = trace.shallower(k)
    rows = longest_starts(trace)
    confidence = trace.confidence[rows].astype(np.float64)
    if not (trace.informed and np.ptp(confidence, axis=0).any()):
        raise InputError("the trace has no drafter confidence; record it with a drafter that reports probabilities")
    likely = np.clip(confidence, LEAST_PROB, 1 - LEAST_PROB)
    place, match = np.arange(k), trace.match_len[rows, None]
    drafted = place < trace.draft_limit[rows, None]
    drafts = Drafts(np.log(likely / (1 - likely)), drafted, drafted & (place < match))
    sequence = np.searchsorted(trace.offsets, rows, side="right") - 1
    first = np.isin(sequence, split_sequences(trace, seed=0)[0])
    ones, temperatures = np.ones(k), fit(drafts)
    after = np.empty(drafts.logit.shape)
    for held in (first, ~first):
        after[held] = survival(drafts.select(held), fit(drafts.select(~held)))
    return Temperatures(temperatures, len(rows), _errors(drafts, survival(drafts, ones)), _errors(drafts, after))


def fit(drafts: Drafts) -> Floats:
    """Fit, for each draft position, the temperature of largest likelihood on the tokens verified there."""
    from scipy.optimize import minimize_scalar

    temperatures = []
    for place, seen in enumerate(drafts.verified.T):
        if not seen.any():
            raise InputError(
                f"no draft of the trace was accepted up to its token {place + 1}, so that its confidence cannot be "
                f"judged; give --k {place} or a longer trace"
            )
        signed = np.where(drafts.accepted[seen, place], 1.0, -1.0) * drafts.logit[seen, place]

        def surprise(inverse: float, signed: Floats = signed) -> float:
            """Negative log-likelihood; convex in the temperature's inverse."""
            return float(np.logaddexp(0.0, -inverse * signed).mean())

        bounds = 1 / MOST_TEMPERATURE, 1 / LEAST_TEMPERATURE
        best = minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-8}).x
        temperatures.append(1 / float(best))
    return np.array(temperatures)


def survival(drafts: Drafts, temperatures: Floats) -> Floats:
    """Probability [R, K] that the first i tokens are all accepted."""
    return np.asarray(np.cumprod(1 / (1 + np.exp(-drafts.logit / temperatures)), axis=1))


def _errors(drafts: Drafts, prob: Floats) -> Floats:
    """Expected calibration error at each place [K], of the rounds that draft so far."""
    columns = zip(prob.T, drafts.accepted.T, drafts.drafted.T, strict=True)
    return np.array([reliability(predicted[has], hit[has], BINS).ece for predicted, hit, has in columns])
