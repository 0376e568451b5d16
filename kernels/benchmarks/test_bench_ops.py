"""pytest-benchmark cases: the public functions at small shapes, to notice when a change slows them down.

`speckernels bench` is the measurement; this needs a minute and no GPU:
`pytest kernels/benchmarks --benchmark-only`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speckernels.bench import machine
from speckernels.bench.cases import OPERATIONS
from speckernels.bench.cases.base import SEED, Operation
from speckernels.runtime.dispatch import use_backend

DEVICE = machine.default_device()
BACKENDS = ("reference", "triton", "cuda") if DEVICE.type == "cuda" else ("reference", "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda op: op.name)
def test_operation(benchmark: Any, operation: Operation, backend: str) -> None:
    case = operation.small[0]
    args = operation.inputs(case, torch.Generator(DEVICE).manual_seed(SEED))
    benchmark.group = str(case)

    def run() -> None:
        operation.run(*args)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    with torch.no_grad(), use_backend(backend):
        benchmark.pedantic(run, rounds=5, warmup_rounds=1)
