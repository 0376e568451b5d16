"""Speed and memory of evaluating many configurations at once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from specsim.learn.evaluate import evaluate_many
from specsim.learn.search import fixed_settings
from specsim.learn.space import search_space
from specsim.policy.chain.adaedl import AdaEDL
from specsim.replaying.priced import PricedTrace
from tests.bench.test_replay_speed import realistic_trace
from tests.support.reference import RampCost

pytestmark = pytest.mark.bench


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
