"""From what a drafter shows to a calibrated probability of acceptance: the part that runs while drafting.

Shared by `RenewalStop` and by `specsim.learn.calibration`, which fits the weights and knots.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

FEATURES = 6  # of a drafted token, as `features` lists them
SMALLEST = 1e-6  # probability


@nb.njit
def features(confidence, entropy_nats, prob, depth, run, past):  # type: ignore[no-untyped-def]
    """Return the features that predict the acceptance of the depth-th token of a round.

    Confidence and the drafted token's own probability (another where the drafter samples) as log
    odds; sqrt(entropy), of which AdaEDL's score 1 - sqrt(gamma H) is a linear
    function, so that gamma needs no choice; log depth; log(1 + run), run being the tokens emitted
    since a draft was last rejected, for easy stretches of text last longer than a round; and
    past, the sum of the log confidences of the round's earlier tokens.
    """
    return (
        log_odds(confidence),
        math.sqrt(max(entropy_nats, 0.0)),
        log_odds(prob),
        math.log(depth),
        math.log1p(run),
        past,
    )


@nb.njit
def log_odds(prob):  # type: ignore[no-untyped-def]
    """log(p / (1 - p)), finite at 0 and 1 too."""
    clipped = min(max(prob, SMALLEST), 1.0 - SMALLEST)
    return math.log(clipped / (1.0 - clipped))


@nb.njit
def score(weights, confidence, entropy_nats, prob, depth, run, past):  # type: ignore[no-untyped-def]
    """Linear score of a drafted token; weights [1 + FEATURES], the intercept first."""
    f = features(confidence, entropy_nats, prob, depth, run, past)
    total = weights[0]
    for i in range(FEATURES):
        total += weights[1 + i] * f[i]
    return total


@nb.njit
def with_one_more(past, confidence):  # type: ignore[no-untyped-def]
    """`past` for the next token of the round."""
    return past + math.log(max(confidence, SMALLEST))


@nb.njit
def interpolate(x, knots_x, knots_y):  # type: ignore[no-untyped-def]
    """Linear between increasing knots, constant beyond them."""
    if x <= knots_x[0]:
        return knots_y[0]
    if x >= knots_x[-1]:
        return knots_y[-1]
    right = np.searchsorted(knots_x, x, side="right")
    share = (x - knots_x[right - 1]) / (knots_x[right] - knots_x[right - 1])
    return knots_y[right - 1] + share * (knots_y[right] - knots_y[right - 1])


@nb.njit
def run_after(run, drafted, accepted):  # type: ignore[no-untyped-def]
    """Update the number of tokens emitted since a draft was last rejected."""
    return run + accepted + 1.0 if accepted == drafted else 0.0
