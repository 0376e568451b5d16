"""How soon a command, the chain oracle, the searches for static trees and an evaluation of many have their answers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.learn.evaluate import evaluate_many
from specsim.learn.search import fixed_settings
from specsim.learn.space import search_space
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.static_tree.optimal import optimal_tree
from specsim.policy.static_tree.search import best_trees
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.replaying.table import cost_table
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace
from tests.bench.test_replay_speed import realistic_trace
from tests.specsim.policy.static_tree.test_static_trees import round_cost
from tests.support.reference import RampCost, build_trace, small_trace

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


def test_replay_answers_within_a_second(tmp_path: Path) -> None:
    """The bound only forgives busy machines."""
    write_trace(small_trace(), tmp_path / "trace")
    (tmp_path / "cost.json").write_text('{"s_d": 1e-3, "s_t": 1e-2}')
    args = ["replay", "trace", "--policy", "adaedl", "--set", "max_draft_tokens=6", "--cost", "cost.json", "--json"]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "specsim", *args], cwd=tmp_path, capture_output=True, check=True)
        best = min(best, time.perf_counter() - start)
    assert best < 3.0


def test_ten_thousand_configurations_on_a_million_positions(capsys: pytest.CaptureFixture[str]) -> None:
    """Under 90 s on two cores and 2 GB beyond the trace.

    Time is counted in seconds of processors, which other programs do not lengthen much.
    """
    trace = realistic_trace()
    held = fixed_settings(AdaEDL, {}, {"depth": trace.depth})
    points = [{**held, **point} for point in search_space(AdaEDL, held, {"depth": trace.depth}).sobol(10_000, 0)]
    evaluate_many(AdaEDL, points[:1], PricedTrace(trace, RampCost()))  # compiles
    with PeakMemory() as memory:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        brute = evaluate_many(AdaEDL, points, PricedTrace(trace, RampCost()), jobs=2)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    with capsys.disabled():
        print(
            f"\n10,000 configurations: {cpu_s:.0f} s of processors, {wall_s:.0f} s of wall clock on 2 threads, "
            f"{memory.beyond_bytes / 1e6:.0f} MB beyond the trace; best {brute.speedup.max():.4f}"
        )
    assert cpu_s / 2 < 90 and memory.beyond_bytes < 2e9


class PeakMemory:
    """Most memory that the process held inside the block, beyond what it held before."""

    def __enter__(self) -> PeakMemory:
        self.before, self.beyond_bytes, self.over = self.held(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.over.wait(0.02):
            self.beyond_bytes = max(self.beyond_bytes, self.held() - self.before)

    @staticmethod
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
