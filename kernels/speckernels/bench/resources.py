"""Registers, shared memory and spills of the CUDA sources, from the compiler's report."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from speckernels.runtime import build

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel. name : as in the binary; shared_bytes : static shared memory."""

    name: str
    architecture: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Built:
    """One source. seconds : of its compilation; None if it lay in the cache."""

    source: str
    seconds: float | None
    kernels: tuple[Kernel, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_report(report: str) -> tuple[Kernel, ...]:
    """Parse the kernels of a report of `ptxas -v`."""
    kernels = []
    name = architecture = ""
    stack = spills = 0
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            name, architecture = match.groups()
            stack = spills = 0
        elif match := _SPILLS.search(line):
            stack, stores, loads = map(int, match.groups())
            spills = stores + loads
        elif name and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            bytes_ = int(shared.group(1)) if shared else 0
            kernels.append(Kernel(name, architecture, int(match.group(1)), stack, spills, bytes_))
            name = ""
    return tuple(kernels)


def build_source(source: str, architectures: Sequence[str]) -> Built:
    """Compile a source if it is not in the cache, and read the compiler's report.

    Raises RuntimeError without nvcc, or with the compiler's message.
    """
    start, clock = time.time(), time.perf_counter()
    library = build.build_device(source, architectures)
    seconds = time.perf_counter() - clock if library.stat().st_mtime >= start - 1e-2 else None
    return Built(source, seconds, parse_report(library.with_suffix(".txt").read_text()))
