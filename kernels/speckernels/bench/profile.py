"""Profiling of one case: the profiled calls, and the command that starts them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import torch

from speckernels.bench import machine
from speckernels.bench.cases import chosen
from speckernels.bench.cases.base import SEED, Case, Operation
from speckernels.bench.inputs import copied
from speckernels.bench.rows import BenchError
from speckernels.bench.runner import OWN, _cases
from speckernels.runtime.dispatch import use_backend

RANGE = "speckernels"  # of NVTX, around the calls to be profiled
WARM_UPS, CALLS = 3, 3


def find_case(op: str, words: Sequence[str], device: torch.device) -> tuple[Operation, Case]:
    """Find the first case of an operation with these sizes; BenchError if there is none."""
    (operation,) = chosen([op])
    cases = _cases(operation, device, False, False, words)
    if not cases:
        raise BenchError(f"no case of {op} has {' '.join(words)}; `speckernels bench --op {op} --json` names them")
    return operation, cases[0]


def run_case(op: str, words: Sequence[str], backend: str) -> Case:
    """Call the operation a few times to warm up, then inside the profiled range."""
    if backend not in OWN:
        raise BenchError(f"backend {backend!r} is none of ours; give {' or '.join(OWN)}")
    device = machine.default_device()
    operation, case = find_case(op, words, device)
    args = operation.inputs(case, torch.Generator(device).manual_seed(SEED))
    buffers = [copied(args) for _ in range(WARM_UPS + CALLS)]
    with torch.no_grad(), use_backend(backend):
        for each in buffers[:WARM_UPS]:
            operation.run(*each)
        with machine.nvtx_range(RANGE):
            for each in buffers[WARM_UPS:]:
                operation.run(*each)
    if machine.is_gpu(device):
        torch.cuda.synchronize(device)
    return case


def ncu_command(op: str, words: Sequence[str], backend: str) -> str:
    """Command of NVIDIA's kernel profiler; clocks are not locked, as in the benchmark."""
    find_case(op, words, machine.default_device())
    own = [sys.executable, "-m", "speckernels", "profile", "--op", op, "--backend", backend, "--run"]
    for word in words:
        own += ["--case", word]
    ncu = ["ncu", "--set", "full", "--clock-control", "none", "--nvtx", "--nvtx-include", f"{RANGE}/", "-f", "-o", op]
    return shlex.join([*ncu, *own])
