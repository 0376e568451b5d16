"""Calibration of tree nodes: the verified nodes, fits to known probabilities, and the ceiling."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from sklearn.metrics import log_loss

from specsim.acceptance.formulas import reliability
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn.tree_calibration import (
    TreeCalibration,
    VerifiedNodes,
    calibrate_tree,
    rounds_of,
    verified_nodes,
    with_ceiling,
)
from specsim.policy.estimates.node_probability import FEATURES, MEMORY
from specsim.policy.tree.hardware_pct import HardwarePCT
from specsim.replaying.replay import replay
from specsim.replaying.rounds import RoundLog
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.tree_traces import tree_trace


@cache
def world(overconfidence: float = 1.0, hidden: float = 0.0, seed: int = 3) -> tuple[Trace, Trace]:
    trace = tree_trace(seed, sequences=160, tokens=100, depth=6, nodes=32, overconfidence=overconfidence, hidden=hidden)
    return trace.select(range(80)), trace.select(range(80, 160))


def test_verified_nodes_are_the_children_of_true_nodes() -> None:
    """Collected from the record's parents and tokens, without the true ranks."""
    trace = tree_trace(0, sequences=2, tokens=20)
    nodes = []
    true = trace.tree.on_path(trace.token, trace.offsets)
    ends = np.repeat(trace.offsets[1:], trace.output_tokens)
    for row in range(len(trace.token)):
        for node in range(1, int(trace.tree.count[row]) + 1):
            parent, depth = int(trace.tree.parent[row, node - 1]), int(trace.tree.depth[row, node - 1])
            if (parent == 0 or true[row, parent - 1]) and row + depth - 1 < ends[row]:
                path = 1.0 if parent == 0 else float(trace.tree.path[row, parent - 1])
                p, rank = float(trace.tree.prob[row, node - 1]), int(trace.tree.rank[row, node - 1])
                inputs = (np.log(p / (1 - p)), 1 / (1 + rank), np.log(depth), np.log(path), np.log1p(0.7))
                nodes.append((*inputs, rank, p, bool(true[row, node - 1])))
    verified = verified_nodes(trace, rounds_of(trace, mean_accepted=0.7))
    table = np.column_stack([verified.features, verified.rank, verified.prob, verified.accepted])
    assert table.shape == (len(nodes), FEATURES + 3)
    np.testing.assert_allclose(table, np.array(nodes, dtype=np.float64), rtol=1e-6, atol=1e-6)


def test_recent_is_a_running_mean_over_rounds_with_a_draft() -> None:
    rows = [[0, 0, 9, 4, 3, 1], [0, 5, 0, 0, 0, 0], [0, 6, 9, 1, 3, 1], [0, 8, 2, 0, 2, 0], [1, 0, 1, 1, 1, 1]]
    log = RoundLog.zeros(len(rows))
    for name, column in zip(log.arrays._fields, np.array(rows).T, strict=False):
        getattr(log, name)[:] = column
    trace = tree_trace(0)
    first = MEMORY * 2 + (1 - MEMORY) * 4
    rounds = rounds_of(trace, log, 2.0)
    np.testing.assert_allclose(rounds.recent, [2, first, first, MEMORY * first + 1 - MEMORY, 2])
    assert rounds.rows.tolist() == [0, 5, 6, 8, 60]


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_calibrated_probabilities_do_not_change(method: str) -> None:
    train, holdout = world()
    model, held = calibrate_tree(verified_nodes(train), method=method), verified_nodes(holdout)
    calibrated = model.prob(held.features)
    assert reliability(held.prob, held.accepted).ece < 0.01 and reliability(calibrated, held.accepted).ece < 0.015
    assert log_loss(held.accepted, calibrated) < 1.01 * log_loss(held.accepted, held.prob)


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_overconfidence_is_corrected(method: str) -> None:
    train, holdout = world(overconfidence=2.0)
    model, held = calibrate_tree(verified_nodes(train), method=method), verified_nodes(holdout)
    calibrated = model.prob(held.features)
    assert reliability(held.prob, held.accepted).ece > 0.05 > 0.02 > reliability(calibrated, held.accepted).ece
    assert log_loss(held.accepted, calibrated) < 0.9 * log_loss(held.accepted, held.prob)
    assert 0.3 < model.weights[1] < 0.8  # the log odds are too large by a factor of 2


def test_recent_rounds_reveal_difficulty_that_the_drafter_does_not_see() -> None:
    trace = tree_trace(3, sequences=120, tokens=200, depth=6, nodes=32, hidden=0.8)
    train, holdout = trace.select(range(80)), trace.select(range(80, 120))
    policy, table = HardwarePCT(width=4, max_depth=6), cost_table(trace, ConstantCost(1e-3, 1e-2))

    def rounds(part: Trace) -> VerifiedNodes:
        return verified_nodes(part, rounds_of(part, replay(part, policy, table, log=True).rounds, policy.mean_accepted))

    def without(verified: VerifiedNodes) -> VerifiedNodes:
        return dataclasses.replace(verified, features=verified.features * (np.arange(FEATURES) < FEATURES - 1))

    training, held = rounds(train), rounds(holdout)
    seeing, blind = calibrate_tree(training), calibrate_tree(without(training))
    assert seeing.weights[-1] > 0.1 and blind.weights[-1] == 0
    gain = np.log(likelihood(seeing, held)) - np.log(likelihood(blind, held))
    assert gain.mean() > 3 * gain.std() / len(gain) ** 0.5


def likelihood(model: TreeCalibration, verified: VerifiedNodes) -> np.ndarray:
    prob = model.prob(verified.features)
    return np.where(verified.accepted, prob, 1 - prob)


def test_values_are_products_along_the_path_below_the_ceiling() -> None:
    train, _ = world(overconfidence=2.0, hidden=0.5)
    rounds = rounds_of(train, mean_accepted=1.5)
    free = calibrate_tree(verified_nodes(train, rounds))
    model = with_ceiling(free, train, rounds)
    values, path = model.values(train, rounds), train.tree.path.astype(np.float64)
    ceiling = model.scale * path**model.power
    here = train.tree.parent >= 0
    above = np.take_along_axis(values, np.maximum(train.tree.parent, 0).astype(np.int64), axis=1)
    assert (values[:, 0] == 1).all() and (values[:, 1:][~here] == 0).all()
    assert (values[:, 1:] <= above)[here].all() and (values[:, 1:] <= ceiling * (1 + 1e-12))[here].all()
    likely = path > 1e-4
    assert (free.values(train, rounds)[:, 1:] > ceiling)[likely].mean() < 0.002
    capped = np.isclose(values[:, 1:], ceiling)
    product = np.zeros_like(path)
    for row in range(200):
        for node in range(int(train.tree.count[row])):
            parent, depth = int(train.tree.parent[row, node]), int(train.tree.depth[row, node])
            p, rank = float(train.tree.prob[row, node]), int(train.tree.rank[row, node])
            before = 1.0 if parent == 0 else path[row, parent - 1]
            odds = np.log(p / (1 - p)) if 1e-6 < p < 1 - 1e-6 else np.nan
            inputs = np.array([odds, 1 / (1 + rank), np.log(depth), np.log(max(before, 1e-6)), np.log1p(1.5)])
            product[row, node] = above[row, node] * model.prob(inputs)
    plain = (here & ~capped)[:200] & np.isfinite(product[:200])
    assert plain.sum() > 3000
    np.testing.assert_allclose(values[:200, 1:][plain], product[:200][plain], rtol=1e-4)


def test_the_probability_is_constant_if_all_or_no_nodes_are_accepted() -> None:
    verified = verified_nodes(tree_trace(0))
    for accepted in (np.ones_like(verified.accepted), np.zeros_like(verified.accepted)):
        model = calibrate_tree(dataclasses.replace(verified, accepted=accepted))
        assert np.ptp(model.prob(verified.features)) == 0
        assert abs(model.prob(verified.features)[0] - accepted[0]) < 0.01


def test_traces_without_trees_or_nodes_are_refused() -> None:
    trace = tree_trace(0)
    with pytest.raises(InputError, match="--tree-nodes"):
        verified_nodes(dataclasses.replace(trace, tree=None))
    verified = verified_nodes(trace)
    none = (values[:0] for values in (verified.features, verified.rank, verified.prob, verified.accepted))
    with pytest.raises(InputError, match="no drafted token"):
        calibrate_tree(VerifiedNodes(*none))
