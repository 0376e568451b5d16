"""Calibration of acceptance probabilities on features of drafted tokens (Platt 1999; isotonic regression).

They are probabilities of the token just drafted, or of the next token, given the drafter's features. The fit to a trace
uses verified tokens: those whose draft prefix is accepted, so that the target's choice decides on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Bools, Floats, IntArray
from specsim.io.compiled import njit
from specsim.io.errors import InputError
from specsim.policy.estimates.token_probability import FEATURES, features, run_after, with_one_more
from specsim.replaying.rounds import RoundLog
from specsim.trace.trace import Trace

Method = Literal["platt", "isotonic"]
Signal = Literal["confidence", "entropy", "both", "all"]

HIDDEN = {"confidence": [1, 2], "entropy": [0, 2, 5], "both": [2], "all": []}  # features that a signal does not use
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


def verified_tokens(trace: Trace) -> tuple[npt.NDArray[np.float32], Bools]:
    """Confidence and acceptance of every verified token: a drafted token whose draft prefix was accepted."""
    depth = np.arange(trace.depth)[None]
    verified = (depth <= trace.match_len[:, None]) & (depth < trace.draft_limit[:, None])
    accepted = depth < trace.match_len[:, None]
    return trace.confidence[verified], accepted[verified]


@dataclass(frozen=True)
class Tokens:
    """Drafted tokens of R rounds, up to depth D.

    features : float64 [R, D, FEATURES]
    verified, accepted : bool [R, D], whether the draft prefix is accepted, and whether the token is accepted too
    in_range : bool [R, D], whether the text and the budget do not end before the token
    """

    features: Floats
    verified: Bools
    accepted: Bools
    in_range: Bools

    def followed(self) -> tuple[Floats, Bools]:
        """Features [n, FEATURES] of accepted tokens, and whether the next token is accepted too."""
        known = self.verified[:, 1:]
        return self.features[:, :-1][known], self.accepted[:, 1:][known]


def drafted_tokens(trace: Trace, rounds: RoundLog | None = None) -> Tokens:
    """Collect the tokens, up to the recorded depth, of a replay's rounds, or of rounds from every position.

    Rounds of a replay have the run of accepted tokens since the last rejection; in others it is 0.
    """
    if rounds is None:
        rows: IntArray = np.arange(len(trace.token))
        run = np.zeros(len(rows))
    else:
        rows = trace.offsets[rounds.sequence] + rounds.t
        run = runs_before(rounds.arrays)
    depth = np.arange(trace.depth)[None]
    match, limit = trace.match_len[rows, None].astype(np.int64), trace.draft_limit[rows, None]
    in_range = depth < limit
    return Tokens(
        features=feature_table(trace.confidence[rows], trace.entropy_nats[rows], trace.prob[rows], run),
        verified=in_range & (depth <= match),
        accepted=in_range & (depth < match),
        in_range=in_range,
    )


def calibrate(features: Floats, accepted: Bools, *, signal: Signal = "all", method: Method = "platt") -> Calibration:
    """Calibrate the acceptance `accepted` [n] of n tokens on the features [n, FEATURES] that a signal uses."""
    used = np.setdiff1d(np.arange(FEATURES), HIDDEN[signal])
    return calibrate_features(features, accepted, used=used, method=method)


@njit
def feature_table(confidence, entropy_nats, prob, run):  # type: ignore[no-untyped-def]
    """`features` of R rounds' tokens: three [R, D] arrays, run [R] -> float64 [R, D, FEATURES]."""
    rounds, depth = confidence.shape
    result = np.empty((rounds, depth, FEATURES))
    for r in range(rounds):
        past = 0.0
        for i in range(depth):
            top, entropy, p = np.float64(confidence[r, i]), np.float64(entropy_nats[r, i]), np.float64(prob[r, i])
            values = features(top, entropy, p, i + 1, run[r], past)
            for f in range(FEATURES):
                result[r, i, f] = values[f]
            past = with_one_more(past, top)
    return result


@njit
def runs_before(rounds):  # type: ignore[no-untyped-def]
    """`run` before each of these `RoundArrays`: float64 [R], from 0 in each sequence."""
    result = np.zeros(len(rounds.t))
    for r in range(1, len(rounds.t)):
        if rounds.sequence[r] == rounds.sequence[r - 1]:
            result[r] = run_after(result[r - 1], rounds.drafted[r - 1], rounds.accepted[r - 1])
    return result
