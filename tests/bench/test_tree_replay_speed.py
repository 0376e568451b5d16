"""Speed of replaying trees, never without the result."""

from __future__ import annotations

import time

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from specsim.cost.model import ConstantCost
from specsim.policy.tree.pct import PCT
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.tree_traces import tree_trace

NODES, SEQUENCE_TOKENS = 64, 250
pytestmark = pytest.mark.bench

MIN_POSITIONS_PER_S = 2e6  # of one core
CALLS = range(4, 60)  # fewest and most; the best counts, as other work may hold the machine for a while
EDD_7B = ConstantCost(s_d=1.1e-3, s_t=29.8e-3)  # EDD + PCT, appendix B


@pytest.fixture(scope="module")
def some() -> Trace:
    """50,000 positions of uneven difficulty; tau about 4, and trees of about 40 nodes."""
    return tree_trace(
        0, sequences=200, tokens=SEQUENCE_TOKENS, depth=10, width=5, nodes=NODES, vocabulary=16, easiness=3.0
    )


def repeated(trace: Trace, positions: int) -> Trace:
    """So many positions: the trace's sequences again and again."""
    return trace.select(np.arange(positions // SEQUENCE_TOKENS) % trace.sequences)


def seconds(trace: Trace, enough_s: float) -> float:
    """Least seconds of a replay under PCT."""
    policy, best = PCT(cost_ratio=EDD_7B.s_d / EDD_7B.s_t), float("inf")
    table = cost_table(trace, EDD_7B, policy)
    for call in range(CALLS.stop):
        start = time.perf_counter()
        replay(trace, policy, table)
        best = min(best, time.perf_counter() - start)
        if call >= CALLS.start and best <= enough_s:
            break
    return best


def test_two_million_positions_a_second_for_pct_at_64_nodes(
    some: Trace, benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    million = repeated(some, 1_000_000)
    policy = PCT(cost_ratio=EDD_7B.s_d / EDD_7B.s_t)
    table = cost_table(million, EDD_7B, policy)
    whole, once = replay(million, policy, table), replay(some, policy, cost_table(some, EDD_7B, policy))
    for name in ("num_rounds", "drafted", "verified", "accepted", "truncated", "seconds"):
        np.testing.assert_array_equal(getattr(whole, name), np.concatenate([getattr(once, name)] * 20))
    rounds = whole.num_rounds.sum()
    benchmark.pedantic(lambda: replay(some, policy, table), rounds=5, warmup_rounds=1)
    spent_s = seconds(million, enough_s=1e6 / MIN_POSITIONS_PER_S)
    record = {
        "positions_per_s": 1e6 / spent_s,
        "rounds_per_s": rounds / spent_s,
        "drafted_nodes": whole.drafted.sum() / rounds,
        "verified_nodes": whole.verified.sum() / rounds,
        "tau": 1e6 / rounds,
    }
    benchmark.extra_info.update({name: float(value) for name, value in record.items()})
    with capsys.disabled():
        print("\ntree replay speed:", ", ".join(f"{name} {value:.4g}" for name, value in record.items()))
    assert some.tree is not None and some.tree.nodes == NODES
    assert 30 < record["verified_nodes"] < 64 and record["tau"] < 5
    assert record["positions_per_s"] >= MIN_POSITIONS_PER_S


def test_time_is_linear_in_positions(some: Trace) -> None:
    """Four times the positions cost 4 times as long, to a quarter; both timed alternately."""
    traces = [repeated(some, size) for size in (100_000, 400_000)]
    best = [float("inf")] * 2
    for _ in range(5):
        for i, trace in enumerate(traces):
            best[i] = min(best[i], seconds(trace, enough_s=float("inf")))
    assert best[1] / best[0] == pytest.approx(4, rel=0.25)
