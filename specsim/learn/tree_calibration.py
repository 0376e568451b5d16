"""Calibrated acceptance probabilities of the nodes of draft trees, fitted to a trace's recorded trees.

The fit uses verified nodes: recorded children of nodes on the true path. Draft probabilities (in Gumbel
mode those given the shared noise) are nearly calibrated without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numba as nb
import numpy as np

from specsim.io.arrays import Bools, Floats, IntArray
from specsim.io.errors import InputError
from specsim.learn.calibration import KNOTS, Calibration, Method, calibrate_features
from specsim.policy.estimates.node_probability import (
    FEATURES,
    REACH,
    accept_prob,
    features,
    recent_after,
    shared_score,
    value,
)
from specsim.replaying.rounds import RoundLog
from specsim.trace.trace import Trace

SMALL_PATH = 1e-4  # smallest draft path probability that the ceiling is fitted to
NEARLY_ALL = 0.999  # share of the nodes below the ceiling


@dataclass(frozen=True)
class Rounds:
    """Starts of rounds: rows [R] of the trace, and `recent` [R], the running mean of accepted tokens before each."""

    rows: IntArray
    recent: Floats


def rounds_of(trace: Trace, log: RoundLog | None = None, mean_accepted: float = 0.0) -> Rounds:
    """Rounds of a tree policy's replay, or rounds from every position, with mean_accepted as `recent`."""
    if log is None:
        return Rounds(np.arange(len(trace.token)), np.full(len(trace.token), mean_accepted))
    return Rounds(trace.offsets[log.sequence] + log.t, recents_before(log.arrays, mean_accepted))


@dataclass(frozen=True)
class VerifiedNodes:
    """Verified nodes: features [n, FEATURES], rank, draft probability given the parent, and acceptance [n]."""

    features: Floats
    rank: IntArray
    prob: Floats
    accepted: Bools


def verified_nodes(trace: Trace, rounds: Rounds | None = None) -> VerifiedNodes:
    """Collect the recorded children of true nodes in these rounds, or in rounds from every position.

    Raises InputError for a trace without recorded trees.
    """
    if trace.tree is None or trace.true_rank is None:
        raise InputError("calibration of trees needs recorded trees and true ranks; use `realrun record --tree-nodes`")
    rounds = rounds or rounds_of(trace)
    return VerifiedNodes(
        *verified_children(rounds.rows, rounds.recent, trace.true_rank, trace.tree.first_child, trace.tree.prob)
    )


@dataclass(frozen=True)
class TreeCalibration(Calibration):
    """Calibration of a tree's nodes: a path probability is at most scale x draft path ^ power."""

    scale: float = 1e9
    power: float = 1.0

    def values(self, trace: Trace, rounds: Rounds) -> Floats:
        """Calibrated path probability of every recorded node, [R, M + 1]; column 0 the root, 0 beyond the last."""
        assert trace.tree is not None
        nodes = (rounds.rows, rounds.recent, trace.tree.first_child, trace.tree.prob)
        result: Floats = recorded_values(*nodes, self.weights, self.probs, self.scale, self.power)
        return result


def calibrate_tree(verified: VerifiedNodes, *, method: Method = "platt") -> TreeCalibration:
    """Calibrate the acceptance of verified nodes, without a ceiling; see `calibrate_features`."""
    knots = np.linspace(-REACH, REACH, KNOTS)
    return TreeCalibration(**vars(calibrate_features(verified.features, verified.accepted, method=method, knots=knots)))


def with_ceiling(model: TreeCalibration, trace: Trace, rounds: Rounds) -> TreeCalibration:
    """Add the lowest ceiling that is above nearly all recorded nodes of these rounds."""
    assert trace.tree is not None
    path = trace.tree.path[rounds.rows].astype(np.float64)
    likely = path > SMALL_PATH
    log_path, log_value = np.log(path[likely]), np.log(np.maximum(model.values(trace, rounds)[:, 1:][likely], 1e-30))
    squares = float(log_path @ log_path)
    power = float(np.clip(log_path @ log_value / squares, 0.3, 1.0)) if squares else 1.0
    excess = np.quantile(log_value - power * log_path, NEARLY_ALL) if len(log_path) else 0.0
    return replace(model, scale=float(np.exp(np.clip(excess, 0.0, 10.0))), power=power)


@nb.njit(cache=True)
def recents_before(rounds, at_first):  # type: ignore[no-untyped-def]
    """`recent` before each of these `RoundArrays`: float64 [R], at_first at a sequence's start."""
    result = np.full(len(rounds.t), at_first)
    for r in range(1, len(rounds.t)):
        if rounds.sequence[r] == rounds.sequence[r - 1]:
            drafted, accepted = rounds.drafted[r - 1], rounds.accepted[r - 1]
            result[r] = recent_after(result[r - 1], accepted) if drafted > 0 else result[r - 1]
    return result


@nb.njit(cache=True)
def verified_children(rows, recent, true_rank, first_child, prob):  # type: ignore[no-untyped-def]
    """Collect the recorded children of true nodes, in rounds that start at `rows` [R], with `recent` [R] before each.

    Returns features float64 [n, FEATURES], rank int64 [n], draft probability float64 [n], and
    whether each is the true token, bool [n].
    """
    depth = true_rank.shape[1]
    n = 0
    for filling in (False, True):  # the first pass counts
        table = np.empty((n, FEATURES))
        ranks, probs, accepted = np.empty(n, np.int64), np.empty(n), np.empty(n, np.bool_)
        n = 0
        for r in range(len(rows)):
            row, node, path = rows[r], np.int64(0), np.float32(1.0)
            for d in range(depth):
                true = np.int64(true_rank[row, d])
                begin, end = np.int64(first_child[row, node]), np.int64(first_child[row, node + 1])
                if true < 0:
                    break
                for rank in range(end - begin):
                    if filling:
                        p = np.float64(prob[row, begin + rank - 1])
                        values = features(p, rank, d + 1, np.float64(path), recent[r])
                        for f in range(FEATURES):
                            table[n, f] = values[f]
                        ranks[n], probs[n], accepted[n] = rank, p, rank == true
                    n += 1
                if true >= end - begin:
                    break
                node = begin + true
                path *= prob[row, node - 1]
    return table, ranks, probs, accepted


@nb.njit(cache=True)
def recorded_values(rows, recent, first_child, prob, weights, accept_probs, scale, power):  # type: ignore[no-untyped-def]
    """Calibrated path probability of every recorded node, float64 [R, M + 1], column 0 the root; see `value`."""
    nodes = prob.shape[1]
    result = np.zeros((len(rows), nodes + 1))
    path = np.ones(nodes + 1, np.float32)
    depth = np.zeros(nodes + 1, np.int64)
    for r in range(len(rows)):
        row = rows[r]
        result[r, 0] = 1.0
        for node in range(nodes + 1):
            begin, end = np.int64(first_child[row, node]), np.int64(first_child[row, node + 1])
            if begin == end:
                continue
            shared = shared_score(weights, depth[node] + 1, np.float64(path[node]), recent[r])
            for child in range(begin, end):
                p = prob[row, child - 1]
                path[child] = path[node] * p
                depth[child] = depth[node] + 1
                likely = accept_prob(shared, weights, accept_probs, np.float64(p), child - begin)
                result[r, child] = value(result[r, node], likely, np.float64(path[child]), scale, power)
    return result
