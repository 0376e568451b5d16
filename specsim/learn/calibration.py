"""Calibration of acceptance probabilities on features of drafted tokens (Platt 1999; isotonic regression)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from specsim.io.arrays import Bools, Floats, IntArray
from specsim.io.errors import InputError

Method = Literal["platt", "isotonic"]

KNOTS = 65
REACH = 8.0  # scores between which Platt's probabilities are given; beyond, they are constant
RIDGE = 0.1  # weight of the squared norm of the standardised weights, relative to the sum of log-losses
LEAST_PROB = 1e-3  # bound on an isotonic fit, which may give 0 or 1 from a few tokens


@dataclass(frozen=True)
class Calibration:
    """Probability of acceptance: a linear score of the features, mapped through knots.

    weights [1 + FEATURES], the intercept first; knots, probs [K], score to probability, linear
    between the knots.
    """

    weights: Floats
    knots: Floats
    probs: Floats

    def score(self, features: Floats) -> Floats:
        """[..., FEATURES] -> [...]"""
        return np.asarray(self.weights[0] + features @ self.weights[1:])

    def prob(self, features: Floats) -> Floats:
        """[..., FEATURES] -> [...], in (0, 1)"""
        return np.interp(self.score(features), self.knots, self.probs)


def calibrate_features(
    features: Floats,
    accepted: Bools,
    *,
    used: IntArray | None = None,
    method: Method = "platt",
) -> Calibration:
    """Fit the acceptance `accepted` [n] of n drafted tokens to their features [n, F].

    used : indices of the features to fit; default: all

    Platt: logistic regression on standardised features. Isotonic: its score mapped by isotonic regression, whose
    thresholds are thinned. If all tokens have the same outcome, the probability is constant. Raises InputError without
    a token.
    """
    if len(accepted) == 0:
        raise InputError("calibration: no drafted token was verified; record more positions")
    used = np.arange(features.shape[1]) if used is None else used
    weights = np.zeros(1 + features.shape[1])
    weights[[0, *(1 + used)]] = logistic_weights(features[:, used], accepted)
    if method == "platt":
        log_odds = np.linspace(-REACH, REACH, KNOTS)
        return Calibration(weights, log_odds, 1 / (1 + np.exp(-log_odds)))
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it

    scores = weights[0] + features @ weights[1:]
    model = IsotonicRegression(y_min=LEAST_PROB, y_max=1 - LEAST_PROB, out_of_bounds="clip").fit(scores, accepted)
    return Calibration(weights, *_thinned(model.X_thresholds_, model.y_thresholds_))


def logistic_weights(features: Floats, accepted: Bools) -> Floats:
    """Weights [1 + F], the intercept first, of a logistic regression of acceptance [n] on standardised features [n, F].

    Constant features get weight 0. If all outcomes are the same, only the intercept is not 0.
    """
    from sklearn.linear_model import LogisticRegression  # slow to import, and a replay does not need it

    weights = np.zeros(1 + features.shape[1])
    if accepted.all() or not accepted.any():
        rate = (accepted.sum() + 1) / (len(accepted) + 2)
        weights[0] = np.log(rate / (1 - rate))
        return weights
    centre, scale = features.mean(axis=0), features.std(axis=0)
    varies = scale > 1e-9 * (1 + np.abs(centre))  # by more than rounding
    if not varies.any():
        weights[0] = np.log(accepted.mean() / (1 - accepted.mean()))
        return weights
    model = LogisticRegression(C=1 / (2 * RIDGE), max_iter=1000)
    model.fit((features[:, varies] - centre[varies]) / scale[varies], accepted)
    weights[1:][varies] = model.coef_[0] / scale[varies]
    weights[0] = model.intercept_[0] - weights[1:][varies] @ centre[varies]
    return weights


def _thinned(knots: Floats, probs: Floats) -> tuple[Floats, Floats]:
    """Thin to at most KNOTS knots, and at least two, strictly increasing."""
    if len(knots) > KNOTS:
        chosen = np.linspace(0, len(knots) - 1, KNOTS).round().astype(int)
        knots, probs = knots[chosen], probs[chosen]
    if len(knots) == 1:
        knots, probs = np.append(knots, knots + 1.0), np.repeat(probs, 2)
    return np.asarray(knots, dtype=np.float64), np.asarray(probs, dtype=np.float64)
