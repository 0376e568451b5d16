"""Speed of the chain oracle and of the searches for static trees."""

from __future__ import annotations

import time

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.static_tree.optimal import optimal_tree
from specsim.policy.static_tree.search import best_trees
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.specsim.policy.static_tree.test_static_trees import round_cost
from tests.support.reference import build_trace

pytestmark = pytest.mark.bench


def test_time_is_linear_in_positions_and_a_million_take_less_than_a_second() -> None:
    rng = np.random.default_rng(0)
    positions, cost = 1_000_000, ConstantCost(1e-3, 1e-2)
    trace = build_trace(rng, rng.random((positions, 8)) < 0.8, [1000] * (positions // 1000))
    part = trace.select(range(100))
    table = cost_table(trace, cost)

    def best_s(which: Trace) -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            chain_oracle_seconds(which, table)
            times.append(time.perf_counter() - begun)
        return min(times)

    chain_oracle_seconds(part, table), trace.draft_limit  # compile, and fill what the trace keeps
    whole_s = best_s(trace)
    assert whole_s < 1.0
    assert whole_s < 10 * 3 * best_s(part)


def test_256_nodes_16_deep_take_no_longer_than_two_seconds() -> None:
    rates = np.outer(0.97 ** np.arange(16), 0.49 * 0.5 ** np.arange(10))
    cost = round_cost(np.random.default_rng(4), depth=16, nodes=256, widths=True)
    optimal_tree(rates, cost, max_nodes=4, max_depth=2)  # compiles
    start = time.process_time()
    best = optimal_tree(rates, cost, max_nodes=256, max_depth=16)
    assert time.process_time() - start < 2
    assert best.nodes >= 1


def test_the_best_tree_of_256_nodes_is_found_at_once() -> None:
    rates = 0.7 ** np.arange(1, 11) * np.ones((16, 1)) * 0.4
    best_trees(rates, 8)
    start = time.perf_counter()
    best_trees(rates, 256)
    assert time.perf_counter() - start < 0.5
