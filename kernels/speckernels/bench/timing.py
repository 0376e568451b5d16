"""Clocks for the CPU, for eager calls on a GPU and for CUDA graphs, and interleaved repeats.

A clock turns calls that differ only in their buffers into a stopwatch: each reading is one
repeat, in microseconds per call. All that needs a GPU is in LaunchClock and GraphClock.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
Stopwatch = Callable[[], float]

MIN_REPEATS = 5
GRAPH_MIN_CALLS = 20  # so that the gap between two replays does not show in one call's share
GRAPH_ENOUGH_US = 500.0  # a replay this long needs no more calls for that
GRAPH_MAX_US = 20_000.0


class Clock(Protocol):
    """mode : name of what it measures."""

    mode: str

    def stopwatch(self, calls: Sequence[Call]) -> Stopwatch:
        """One stopwatch over calls that have run at least once."""
        ...


class CpuClock:
    """Time of one call on the host, the calls taken in turn."""

    mode = "cpu"

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds

    def stopwatch(self, calls: Sequence[Call]) -> Stopwatch:
        turns = cycle(calls)

        def read() -> float:
            call = next(turns)
            start = self._seconds()
            call()
            return (self._seconds() - start) * 1e6

        return read


class LaunchClock:
    """Time on the device from an idle GPU to the end of one eager call: launch included.

    Before each call a buffer of `evict_bytes` is overwritten, so that the L2 cache is cold,
    and the GPU comes to rest, so that the launch cannot hide behind earlier work.
    """

    mode = "launch"

    def __init__(self, device: torch.device, evict_bytes: int, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._evict = torch.empty(evict_bytes, dtype=torch.uint8, device=device)

    def stopwatch(self, calls: Sequence[Call]) -> Stopwatch:
        turns = cycle(calls)
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))

        def read() -> float:
            call = next(turns)
            self._evict.zero_()
            self._cuda.synchronize()
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3

        return read


class HostClock:
    """Time that one eager call keeps the host busy: it only puts its work into the queue of an idle GPU."""

    mode = "host"

    def __init__(self, cuda: Any = torch.cuda, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._cuda = cuda
        self._seconds = seconds

    def stopwatch(self, calls: Sequence[Call]) -> Stopwatch:
        read = CpuClock(self._seconds).stopwatch(calls)

        def read_idle() -> float:
            self._cuda.synchronize()
            return read()

        return read_idle


class GraphClock:
    """Time per call inside a CUDA graph of several calls, without the launch from the host."""

    mode = "graph"

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def stopwatch(self, calls: Sequence[Call]) -> Stopwatch:
        cuda = self._cuda
        side = cuda.Stream()  # capture wants the first calls on a stream of their own
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            calls[0]()
        cuda.current_stream().wait_stream(side)
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for call in calls:
                call()
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))

        def read() -> float:
            graph.replay()  # keeps the GPU busy until the timed replay has been launched
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / len(calls)

        read()
        return read


def graph_calls(calls: Sequence[Call], estimate_us: float) -> list[Call]:
    """Calls to capture in one graph: all buffers in turn, neither too few nor too many."""
    enough = min(GRAPH_MIN_CALLS, math.ceil(GRAPH_ENOUGH_US / estimate_us))
    most = max(1, int(GRAPH_MAX_US / estimate_us))
    return list(islice(cycle(calls), min(max(len(calls), enough), most)))


def interleave(
    stopwatches: Mapping[str, Stopwatch],
    *,
    repeats: int,
    limit_s: float,
    seconds: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Read all stopwatches in turn, so that a drift of the machine meets every backend.

    Returns microseconds. Stops after `repeats` rounds, or once `limit_s` has passed and MIN_REPEATS rounds are done.
    """
    samples: dict[str, list[float]] = {name: [] for name in stopwatches}
    names = list(stopwatches)
    start = seconds()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for done in range(repeats):
            if done >= MIN_REPEATS and seconds() - start > limit_s:
                break
            shift = done % max(1, len(names))  # so that nobody always comes after the same neighbour
            for name in names[shift:] + names[:shift]:
                samples[name].append(stopwatches[name]())
    finally:
        if collecting:
            gc.enable()
    return samples
