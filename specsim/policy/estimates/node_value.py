"""Value in seconds of the nodes of a draft tree: which to expand and which to verify.

Shared by `HardwarePCT` and by `specsim.learn.tree_stopping`, which learns the gains.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np

NEVER = 1e6  # a gain in seconds that nothing reaches
KNOTS = 13  # of the gain of expanding a node, at even distances of the log of its path probability
LOWEST = -6.0  # log path probability at the first knot


@nb.njit
def gain_s(path, own, edges, gains):  # type: ignore[no-untyped-def]
    """Seconds that the children of a node are expected to be worth beyond their verification.

    Of its path probability and own probability; gains [len(edges) + 1, KNOTS], per unit of path probability.
    """
    row = np.searchsorted(edges, own, side="right") * KNOTS
    at = min(max((math.log(path) - LOWEST) * ((KNOTS - 1) / -LOWEST), 0.0), KNOTS - 1.0)
    low = min(int(at), KNOTS - 2)
    left = gains[row + low]
    return path * (left + (at - low) * (gains[row + low + 1] - left))


@nb.njit
def min_useful_path_prob(gains):  # type: ignore[no-untyped-def]
    """Return the path probability up to which the children of a node have no value."""
    rows = len(gains) // KNOTS
    for knot in range(KNOTS):
        for row in range(rows):
            if gains[row * KNOTS + knot] > 0.0:
                return math.exp(LOWEST - LOWEST * (knot - 1) / (KNOTS - 1)) if knot > 0 else 0.0
    return 1.0


@nb.njit
def descending(values):  # type: ignore[no-untyped-def]
    """Return the indices that sort numbers from the largest, ties to the first."""
    return np.argsort(-values, kind="mergesort")


@nb.njit
def best_expanded(gains, extra_nodes_s):  # type: ignore[no-untyped-def]
    """Return how many nodes, of these gains from the largest, a draft pass should expand, and the total gain.

    Net of the cost of a pass wider than a single node.
    """
    best, best_s, total = 0, 0.0, 0.0
    for e in range(1, min(len(gains), len(extra_nodes_s) - 1) + 1):
        total += gains[e - 1]
        if total - extra_nodes_s[e] > best_s:
            best, best_s = e, total - extra_nodes_s[e]
    return best, best_s


@nb.njit
def best_kept(values, time_per_token_s, verify_s):  # type: ignore[no-untyped-def]
    """Return how many nodes, of these path probabilities from the largest, to verify, and the value.

    In seconds, those of the pass taken off. verify_s[n]: a pass over n nodes beside the pending token
    """
    best, best_s, total = 0, -verify_s[0], 0.0
    for n in range(1, min(len(values), len(verify_s) - 1) + 1):
        total += time_per_token_s * values[n - 1]
        if total - verify_s[n] > best_s:
            best, best_s = n, total - verify_s[n]
    return best, best_s


@nb.njit
def irrelevance_bound(values, kept, time_per_token_s, verify_s):  # type: ignore[no-untyped-def]
    """Return a path probability below which further nodes do not change the best `kept` of `best_kept`."""
    high = values[kept - 1] if kept > 0 else 1.0
    if kept == len(verify_s) - 1:
        return high
    low = 0.0
    for _ in range(30):
        middle, fits, total = 0.5 * (low + high), True, 0.0
        for n in range(kept + 1, len(verify_s)):
            total += time_per_token_s * max(middle, values[n - 1] if n <= len(values) else 0.0)
            if total > verify_s[n] - verify_s[kept]:
                fits = False
                break
        if fits:
            low = middle
        else:
            high = middle
    return low
