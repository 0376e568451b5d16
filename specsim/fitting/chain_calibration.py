"""Calibrated acceptance probabilities, learned from a trace (Platt 1999; isotonic regression).

Of the token just drafted, or of the one after it, given what the drafter shows; over judged
tokens, those whose draft prefix is right, so that the target's choice judges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numba as nb
import numpy as np
import numpy.typing as npt

from specsim.arrays import Bools, Floats, IntArray
from specsim.errors import InputError
from specsim.policy.estimates.token_probability import FEATURES, features, run_after, with_one_more
from specsim.replaying.rounds import RoundLog
from specsim.speedup import formulas as metrics
from specsim.trace.outcomes import outcomes
from specsim.trace.trace import Trace

Signal = Literal["confidence", "entropy", "both", "all"]
Method = Literal["platt", "isotonic"]

HIDDEN = {"confidence": [1, 2], "entropy": [0, 2, 5], "both": [2], "all": []}  # features that a signal leaves out
KNOTS = 65
PLATT_REACH = 8.0  # log odds beyond which a calibrated probability stays constant
RIDGE = 0.1  # weight of the squared norm of the standardised weights, against the sum of log-losses
LEAST_PROB = 1e-3  # an isotonic fit may say 0 or 1 from a handful of tokens


def judged_tokens(trace: Trace) -> tuple[npt.NDArray[np.float32], Bools]:
    """Confidence and acceptance of every drafted token whose draft prefix was right, so that
    the target judged it."""
    depth = np.arange(trace.depth)[None]
    judged = (depth <= trace.match_len[:, None]) & (depth < trace.draft_limit[:, None])
    hit = depth < trace.match_len[:, None]
    return trace.confidence[judged], hit[judged]


@dataclass(frozen=True)
class Tokens:
    """Drafted tokens of R rounds, to depth D.

    features : float64 [R, D, FEATURES]
    judged, hit : bool [R, D], whether the draft prefix is right, and the token itself too
    within : bool [R, D], whether the drafter would get there: no end of text or budget before it
    """

    features: Floats
    judged: Bools
    hit: Bools
    within: Bools

    def followed(self) -> tuple[Floats, Bools]:
        """Features [n, FEATURES] of right tokens, and whether the token after each is right too."""
        known = self.judged[:, 1:]
        return self.features[:, :-1][known], self.hit[:, 1:][known]


def drafted_tokens(trace: Trace, rounds: RoundLog | None = None, *, seed: int = 0) -> Tokens:
    """The tokens, to the full recorded depth, of these rounds of a replay, or of rounds from every position.

    Those of a replay have each the run of tokens since the last rejection; without one it is 0.
    Of a trace of rejection sampling the first outcome under this seed is used, as in a replay's rounds.
    """
    match_len, _ = next(outcomes(trace, seed))
    if rounds is None:
        rows: IntArray = np.arange(len(trace.token))
        run = np.zeros(len(rows))
    else:
        rows = trace.offsets[rounds.sequence] + rounds.t
        run = runs_before(rounds.arrays)
    depth = np.arange(trace.depth)[None]
    match, limit = match_len[rows, None].astype(np.int64), trace.draft_limit[rows, None]
    within = depth < limit
    return Tokens(
        features=feature_table(trace.confidence[rows], trace.entropy_nats[rows], trace.prob[rows], run),
        judged=within & (depth <= match),
        hit=within & (depth < match),
        within=within,
    )


@dataclass(frozen=True)
class Calibration:
    """A probability of acceptance: a linear score of the features, mapped through knots.

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


def calibrate(features: Floats, hit: Bools, *, signal: Signal = "all", method: Method = "platt") -> Calibration:
    """Fit acceptance to features [n, FEATURES] of n tokens, of which `hit` [n] says the outcome.

    Platt: logistic regression on standardised features. Isotonic: its score mapped by
    isotonic regression. Where all tokens have one outcome, a constant.

    Raises InputError without a token.
    """
    if len(hit) == 0:
        raise InputError("calibration: no drafted token was judged; record more positions")
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it
    from sklearn.linear_model import LogisticRegression

    weights = np.zeros(1 + FEATURES)
    if hit.all() or not hit.any():
        rate = (hit.sum() + 1) / (len(hit) + 2)
        weights[0] = np.log(rate / (1 - rate))
    else:
        used = np.setdiff1d(np.arange(FEATURES), HIDDEN[signal])
        centre, scale = features[:, used].mean(axis=0), features[:, used].std(axis=0)
        varies = scale > 1e-9 * (1 + np.abs(centre))  # not by rounding alone
        used, centre, scale = used[varies], centre[varies], scale[varies]
        model = LogisticRegression(C=1 / (2 * RIDGE), max_iter=1000)
        if len(used):
            model.fit((features[:, used] - centre) / scale, hit)
            weights[1 + used] = model.coef_[0] / scale
            weights[0] = model.intercept_[0] - weights[1 + used] @ centre
        else:
            weights[0] = np.log(hit.mean() / (1 - hit.mean()))
    if method == "platt":
        knots = np.linspace(-PLATT_REACH, PLATT_REACH, KNOTS)
        return Calibration(weights, knots, 1 / (1 + np.exp(-knots)))
    scores = weights[0] + features @ weights[1:]
    model = IsotonicRegression(y_min=LEAST_PROB, y_max=1 - LEAST_PROB, out_of_bounds="clip").fit(scores, hit)
    knots, probs = _thinned(model.X_thresholds_, model.y_thresholds_)
    return Calibration(weights, knots, probs)


def _thinned(knots: Floats, probs: Floats) -> tuple[Floats, Floats]:
    """At most KNOTS of the knots, and at least two, strictly increasing."""
    if len(knots) > KNOTS:
        kept = np.linspace(0, len(knots) - 1, KNOTS).round().astype(int)
        knots, probs = knots[kept], probs[kept]
    if len(knots) == 1:
        knots, probs = np.append(knots, knots + 1.0), np.repeat(probs, 2)
    return np.asarray(knots, dtype=np.float64), np.asarray(probs, dtype=np.float64)


@dataclass(frozen=True)
class Quality:
    """How well probabilities foretell outcomes: expected calibration error in [0, 1], mean log-loss in nats."""

    ece: float
    log_loss_nats: float

    def as_dict(self) -> dict[str, Any]:
        return {"ece": self.ece, "log_loss_nats": self.log_loss_nats}


def quality(prob: npt.ArrayLike, hit: npt.ArrayLike) -> Quality:
    """ECE in ten bins and log-loss of predictions [n]; probabilities are kept 1e-6 off 0 and 1."""
    p = np.clip(np.asarray(prob, dtype=np.float64), 1e-6, 1 - 1e-6)
    loss = -np.where(np.asarray(hit, dtype=bool), np.log(p), np.log1p(-p))
    return Quality(metrics.reliability(p, hit).ece, float(loss.mean()))


def compare(
    train: Trace, holdout: Trace, *, signal: Signal = "all", method: Method = "platt"
) -> dict[str, dict[str, Any]]:
    """Raw confidence and calibrated probability on held-out judged tokens, rounds from every position."""
    learned, judged = drafted_tokens(train), drafted_tokens(holdout)
    model = calibrate(learned.features[learned.judged], learned.hit[learned.judged], signal=signal, method=method)
    hit = judged.hit[judged.judged]
    return {
        "confidence": quality(holdout.confidence[judged.judged], hit).as_dict(),
        "calibrated": quality(model.prob(judged.features[judged.judged]), hit).as_dict(),
    }


@nb.njit(cache=True)
def feature_table(confidence, entropy_nats, prob, run):  # type: ignore[no-untyped-def]
    """`features` of R rounds' tokens: three [R, D] arrays, run [R] -> float64 [R, D, FEATURES]."""
    rounds, depth = confidence.shape
    result = np.empty((rounds, depth, FEATURES))
    for r in range(rounds):
        past = 0.0
        for i in range(depth):
            shown = np.float64(confidence[r, i]), np.float64(entropy_nats[r, i]), np.float64(prob[r, i])
            one = features(shown[0], shown[1], shown[2], i + 1, run[r], past)
            for f in range(FEATURES):
                result[r, i, f] = one[f]
            past = with_one_more(past, np.float64(confidence[r, i]))
    return result


@nb.njit(cache=True)
def runs_before(rounds):  # type: ignore[no-untyped-def]
    """`run` before each of these `RoundArrays`: float64 [R], from 0 in each sequence."""
    result = np.zeros(len(rounds.t))
    for r in range(1, len(rounds.t)):
        if rounds.sequence[r] == rounds.sequence[r - 1]:
            result[r] = run_after(result[r - 1], rounds.drafted[r - 1], rounds.accepted[r - 1])
    return result
