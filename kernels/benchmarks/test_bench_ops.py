"""Every operation's contenders beside each other, as pytest-benchmark cases.

    pytest kernels/benchmarks --benchmark-only --benchmark-json FILE

All contenders of a case are timed in turns, with cold caches, after their results were compared with the reference's.
A row's `extra_info` has its time, the rates reached, and the ratio to the smallest possible time: bytes over the
bandwidth of a copy, operations over the rate of a matrix product, or the latency of a launch, all measured in the same
run. Modes: `launch` is one eager call on an idle GPU, `graph` a call inside a CUDA graph, `host` what an eager call
keeps the host busy.

SPECKERNELS_BENCH_MINUTES (default 3) limits the run, main cases first. `-m "headline and not slow"` takes only those,
and `-m slow` what torch.compile makes. Without a GPU the shapes are small and torch is timed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from speckernels.bench import machine
from speckernels.bench.cases import ordered_cases
from speckernels.bench.measure import COMPILED, OWN, Bench, Measured, contender_names, one_line

DEVICE = machine.default_device()
CASES = ordered_cases(on_gpu=machine.is_gpu(DEVICE))
MODES = ("launch", "graph", "host") if machine.is_gpu(DEVICE) else ("cpu",)

_elapsed_s = 0.0


def device_clock() -> float:
    """Seconds of the calls measured so far: pytest-benchmark's timer, since its own would time the host's part."""
    return _elapsed_s


def replay(samples_us: Iterator[float]) -> None:
    """Let the time of the next measured call pass."""
    global _elapsed_s
    _elapsed_s += next(samples_us) / 1e6


def rows() -> Iterator[Any]:
    for number, (operation, case) in enumerate(CASES):
        for mode in MODES:
            for name in contender_names(operation, case, DEVICE):
                marks = [pytest.mark.headline] if operation.headline(case) else []
                marks += [pytest.mark.slow] if name in COMPILED else []
                yield pytest.param(number, mode, name, id=f"{case}-{mode}-{name}", marks=marks)


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # where a check failed, which is the error
@pytest.mark.benchmark(timer=device_clock)
@pytest.mark.parametrize(("number", "mode", "contender"), [*rows()])
def test_operation(
    benchmark: Any, run: Bench, measured: Callable[[int], Measured | None], number: int, mode: str, contender: str
) -> None:
    _, case = CASES[number]
    found = measured(number)
    if found is None:
        pytest.skip("the minutes are over; give more by SPECKERNELS_BENCH_MINUTES")
    if error := found.errors.get((contender, mode)):
        if contender in (*OWN, "torch"):
            raise error
        pytest.skip(f"{contender}: {one_line(error)}")
    reading = found.readings[contender, mode]
    benchmark.group = f"{case}-{mode}"
    benchmark.extra_info.update(run.row(case, contender, mode, reading, found.work))
    benchmark.pedantic(replay, (iter(reading.samples_us),), rounds=len(reading.samples_us))
