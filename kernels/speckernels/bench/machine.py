"""The device under test: its name, versions, working backends and ceilings."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import torch

from speckernels.bench.cases.base import Work
from speckernels.bench.timing import Call, Clock, CpuClock, GraphClock, HostClock, LaunchClock, interleave
from speckernels.ops.tree_attention import TMA_ENVIRONMENT
from speckernels.runtime import build, dispatch

EVICT_FACTOR = 2  # times the L2 cache
ASSUMED_L2_BYTES = 64 << 20  # where torch does not tell
GRAPH_NODES = 200
BUFFER_PART = 8  # of the GPU's memory


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of the device.

    copy_gb_s : large copy on the device, 1e9 bytes read and written per second
    matmul_tflop_s : large matrix product, 1e12 floating-point operations per second
    launch_us : the smallest operation, launch included
    graph_node_us : the smallest operation inside a CUDA graph; None without CUDA
    """

    copy_gb_s: float
    matmul_tflop_s: float
    matmul_dtype: str
    launch_us: float
    graph_node_us: float | None

    def floor(self, work: Work, mode: str) -> tuple[float, str]:
        """Smallest possible time in microseconds, and the limit that sets it."""
        latency_us = self.graph_node_us if mode == "graph" and self.graph_node_us is not None else self.launch_us
        limits = {
            "bytes": work.bytes / (self.copy_gb_s * 1e3),
            "flops": work.flops / (self.matmul_tflop_s * 1e6),
            "launch": latency_us,
        }
        kind = max(limits, key=lambda name: limits[name])
        return limits[kind], kind


def default_device() -> torch.device:
    """The GPU, if there is one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def is_gpu(device: torch.device) -> bool:
    """Whether the device supports large shapes, CUDA's clocks and a cold cache."""
    return device.type == "cuda"


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


CONDITIONS = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "celsius"}


def conditions(device: torch.device) -> dict[str, float]:
    """Current clocks, power and temperature of the GPU; empty if nvidia-smi does not report them."""
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return {}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid else []
    query = [tool, *which, f"--query-gpu={','.join(CONDITIONS)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()[0]
        return dict(zip(CONDITIONS.values(), map(float, line.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):  # a field may be "[N/A]"
        return {}


def evict_bytes(device: torch.device) -> int:
    """Number of bytes that evict everything from the L2 cache."""
    properties = torch.cuda.get_device_properties(device)
    return EVICT_FACTOR * int(getattr(properties, "L2_cache_size", 0) or ASSUMED_L2_BYTES)


def buffer_bytes(device: torch.device) -> int:
    """Memory limit, in bytes, of the copies of a case's inputs."""
    return int(torch.cuda.get_device_properties(device).total_memory) // BUFFER_PART


def versions() -> dict[str, str]:
    """Versions of torch, Triton, CUDA and these kernels, with a digest of their sources and active switches."""
    setting = os.environ.get(TMA_ENVIRONMENT)
    switch = f" {TMA_ENVIRONMENT}={setting}" if setting else ""
    return {
        "torch": torch.__version__,
        "triton": _installed("triton") or "none",
        "cuda": torch.version.cuda or "none",
        "speckernels": f"{_installed('specsim') or '0'}+{_source_digest()}{switch}",
        "python": platform.python_version(),
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _source_digest() -> str:
    package = Path(dispatch.__file__).parents[1]
    files = [p for p in package.rglob("*.py") if "bench" not in p.relative_to(package).parts]
    digest = hashlib.sha256()
    for file in sorted([*files, *build.source_folder().glob("*.*")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def clocks(device: torch.device) -> list[Clock]:
    """Clocks that time calls on this device."""
    if device.type == "cuda":
        return [LaunchClock(device, evict_bytes(device)), GraphClock(), HostClock()]
    return [CpuClock()]


def measure_ceilings(device: torch.device, *, repeats: int = 30, limit_s: float = 2.0) -> Ceilings:
    """Measure copy bandwidth, matrix rate and launch latency with the benchmark's clocks."""
    gpu = device.type == "cuda"
    large = 1 << (30 if gpu else 25)  # bytes; far beyond any cache on a GPU
    side, dtype = (8192, torch.bfloat16) if gpu else (768, torch.float32)
    source = torch.randint(0, 256, (large,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    result = torch.empty_like(left)
    word = torch.zeros(1, device=device)
    eager, graph = CpuClock() if not gpu else LaunchClock(device, evict_bytes(device)), GraphClock() if gpu else None

    def median_us(clock: Clock, calls: Sequence[Call]) -> float:
        for call in calls:
            call()
        return median(interleave({"": clock.stopwatch(calls)}, repeats=repeats, limit_s=limit_s)[""])

    def large_us(call: Callable[[], object]) -> float:
        return median_us(graph, [call] * 4) if graph else median_us(eager, [call])

    with torch.no_grad():
        copy_us = large_us(lambda: target.copy_(source))
        matmul_us = large_us(lambda: torch.mm(left, right, out=result))
        # One written element and, on a GPU, an empty kernel.
        smallest: list[Call] = [word.zero_, lambda: torch.cuda._sleep(0)] if gpu else [word.zero_]
        node_us = min(median_us(graph, [call] * GRAPH_NODES) for call in smallest) if graph else None
        return Ceilings(
            copy_gb_s=2 * large / copy_us / 1e3,
            matmul_tflop_s=2 * side**3 / matmul_us / 1e6,
            matmul_dtype=str(dtype).removeprefix("torch."),
            launch_us=min(median_us(eager, [call]) for call in smallest),
            graph_node_us=node_us,
        )
