"""The clock that times decoding: wall time or the process's CPU time, after the device has finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from specsim.io.errors import InputError

Clock = Callable[[], float]
WALL, CPU = "wall", "cpu"
_chosen = WALL


def now() -> float:
    """Read the host's clock in seconds; only differences mean something.

    The CPU clock counts user and system time of all threads of this process, native threads included.
    """
    return time.process_time() if _chosen == CPU else time.perf_counter()


def clock_name() -> str:
    """Name the clock that is read: "wall" or "cpu"."""
    return _chosen


@contextmanager
def use_clock(name: str) -> Iterator[None]:
    """Time the block's work by this clock: "wall", or "cpu", which other processes do not move."""
    global _chosen
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def check_clock(name: str, device: str, threads: int) -> None:
    """Refuse the CPU clock where it would not show what a round takes: on a GPU, and with several threads."""
    if name == CPU and (device.partition(":")[0] != "cpu" or threads != 1):
        raise InputError(
            f"--clock cpu times one CPU thread, not device {device} with {threads or 'any number of'} threads; "
            "pass --device cpu --threads 1, or --clock wall"
        )


def device_clock(device: torch.device) -> Clock:
    """Make a clock that reads `now` after the device has finished its work."""
    check_clock(_chosen, str(device), torch.get_num_threads())
    if device.type != "cuda":
        return now

    def read() -> float:
        torch.cuda.synchronize(device)
        return now()

    return read
