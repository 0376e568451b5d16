"""What the benchmarks of the kernels share: one run on this device, and what is known of it in the JSON file."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pytest

from speckernels.bench import machine
from speckernels.bench.cases import ordered_cases
from speckernels.bench.measure import Bench, DeviceLost, Measured

DEVICE = machine.default_device()
RUN = pytest.StashKey[Bench]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "headline: the main cases of tree attention and draft statistics")


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Bench:
    bench = Bench(DEVICE, float(os.environ.get("SPECKERNELS_BENCH_MINUTES", "3")))
    request.config.stash[RUN] = bench
    return bench


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest, run: Bench) -> Callable[[int], Measured | None]:
    """Measure a case once, all contenders whose tests were selected in turns."""
    selected: dict[int, dict[str, None]] = defaultdict(dict)
    for item in request.session.items:
        if "contender" in (params := item.callspec.params if hasattr(item, "callspec") else {}):
            selected[params["number"]][params["contender"]] = None
    cases = ordered_cases(on_gpu=machine.is_gpu(DEVICE))

    @cache
    def measure(number: int) -> Measured | None:
        try:
            return run.measure(*cases[number], [*selected[number]])
        except DeviceLost as error:
            pytest.exit(str(error), returncode=1)

    return measure


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    if RUN in config.stash:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        output_json |= {"kind": "speckernels-benchmark", "date": now, **config.stash[RUN].facts()}
