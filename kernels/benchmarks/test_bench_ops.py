"""pytest-benchmark cases: the public functions, to notice when a change slows them down.

`speckernels bench` is the measurement; this needs a minute: `pytest kernels/benchmarks --benchmark-only`, with
`--benchmark-json FILE` to keep it. On a GPU the shapes are real ones, the headline's; without one they are small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speckernels.bench import machine
from speckernels.bench.cases import OPERATIONS
from speckernels.bench.cases.base import SEED, Case, Operation
from speckernels.runtime.dispatch import use_backend

DEVICE = machine.default_device()
BACKENDS = ("reference", "triton", "cuda") if DEVICE.type == "cuda" else ("reference", "cuda")


def cases_of(operation: Operation, device: torch.device) -> tuple[Case, ...]:
    """A GPU's cases: those of the headline, else the most telling one."""
    if device.type != "cuda":
        return operation.small[:1]
    return tuple(filter(operation.headline, operation.cases)) or operation.cases[:1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("operation", "case"),
    [pytest.param(op, case, id=str(case)) for op in OPERATIONS for case in cases_of(op, DEVICE)],
)
def test_operation(benchmark: Any, operation: Operation, case: Case, backend: str) -> None:
    args = operation.inputs(case, torch.Generator(DEVICE).manual_seed(SEED))
    benchmark.group = str(case)
    benchmark.extra_info.update(device=machine.device_name(DEVICE), **machine.versions())

    def run() -> None:
        operation.run(*args)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad(), use_backend(backend):
        benchmark.pedantic(run, rounds=5, warmup_rounds=1)
