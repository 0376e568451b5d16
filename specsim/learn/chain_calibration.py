"""Calibrated acceptance probabilities of drafted tokens, fitted to a trace.

They are probabilities of the token just drafted, or of the next token, given the drafter's features. The fit uses
verified tokens: those whose draft prefix is accepted, so that the target's choice decides on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Bools, Floats, IntArray
from specsim.io.compiled import njit
from specsim.learn.calibration import Calibration, Method, calibrate_features
from specsim.policy.estimates.token_probability import FEATURES, features, run_after, with_one_more
from specsim.replaying.rounds import RoundLog
from specsim.trace.trace import Trace

Signal = Literal["confidence", "entropy", "both", "all"]

HIDDEN = {"confidence": [1, 2], "entropy": [0, 2, 5], "both": [2], "all": []}  # features that a signal does not use


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
