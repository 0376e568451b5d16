"""Calibrated acceptance probabilities of a tree's nodes, from what the drafter shows: what runs while drafting.

Shared by `HardwarePCT` and by `specsim.learn.tree_calibration`, which fits the weights and probabilities.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

from specsim.policy.estimates.token_probability import SMALLEST, log_odds

FEATURES = 5  # of a node, as `features` lists them
REACH = 8.0  # scores between which probabilities are given, at even distances; beyond, they are constant
MEMORY = 0.5  # weight of the past in the running mean of accepted tokens


@nb.njit
def features(prob, rank, depth, parent_path, recent):  # type: ignore[no-untyped-def]
    """Return the features that predict the acceptance of a node whose parent is accepted.

    Its draft probability given its parent, as log odds; 1 / (1 + rank); log depth; the log of the
    parent's path probability, for a node deep in a doubtful tree is less sure than it looks; and
    log(1 + recent), recent being a running mean of the tokens accepted per round, for easy
    stretches of text last longer than a round.
    """
    return (
        log_odds(prob),
        1.0 / (1.0 + rank),
        math.log(depth),
        math.log(max(parent_path, SMALLEST)),
        math.log1p(recent),
    )


@nb.njit
def shared_score(weights, depth, parent_path, recent):  # type: ignore[no-untyped-def]
    """Compute the part of the linear score that siblings share; weights [1 + FEATURES], the intercept first."""
    return (
        weights[0]
        + weights[3] * math.log(depth)
        + weights[4] * math.log(max(parent_path, SMALLEST))
        + weights[5] * math.log1p(recent)
    )


@nb.njit
def accept_prob(shared, weights, accept_probs, prob, rank):  # type: ignore[no-untyped-def]
    """Calibrated probability of a node given its parent.

    accept_probs : at even scores from -REACH to REACH; linear between them
    """
    score = shared + weights[1] * log_odds(prob) + weights[2] / (1.0 + rank)
    last = len(accept_probs) - 1
    at = min(max((score + REACH) * (last / (2.0 * REACH)), 0.0), float(last))
    low = min(int(at), last - 1)
    return accept_probs[low] + (at - low) * (accept_probs[low + 1] - accept_probs[low])


@nb.njit
def min_draft_prob(shared, weights, accept_probs, rank, wanted):  # type: ignore[no-untyped-def]
    """Invert `accept_prob`: return the least draft probability that gives this rank a probability of `wanted`.

    Below it, no node of this or a later rank reaches `wanted`. A result above 1: no draft probability suffices.
    """
    last = len(accept_probs) - 1
    if wanted <= accept_probs[0]:
        return 0.0
    if wanted > accept_probs[last] or weights[1] <= 0.0:
        return 2.0 if wanted > accept_probs[last] else 0.0
    right = np.searchsorted(accept_probs, wanted)
    share = (wanted - accept_probs[right - 1]) / (accept_probs[right] - accept_probs[right - 1])
    score = (right - 1 + share) * (2.0 * REACH / last) - REACH
    by_rank = max(weights[2], 0.0) / (1.0 + rank)  # where early ranks are worse, no later rank is better than this
    odds = (score - shared - by_rank) / weights[1]
    return 1.0 / (1.0 + math.exp(-odds)) if odds > log_odds(0.0) else 0.0


@nb.njit
def recent_after(recent, accepted):  # type: ignore[no-untyped-def]
    """Update the running mean of accepted tokens after a round with a draft."""
    return MEMORY * recent + (1.0 - MEMORY) * accepted


@nb.njit
def value(parent_value, likely, path, scale, power):  # type: ignore[no-untyped-def]
    """Calibrated path probability: the parent's times the node's own probability, and at most scale x path^power.

    The ceiling, which the fit puts above nearly all nodes, makes sure that a node of a small
    draft path probability has a small calibrated probability.
    """
    likely_path = parent_value * likely
    if likely_path <= scale * path:  # which is below the ceiling, for power <= 1
        return likely_path
    return min(likely_path, scale * path**power)
