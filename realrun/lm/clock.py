"""A clock that waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Clock = Callable[[], float]


def device_clock(device: torch.device) -> Clock:
    """Seconds, read after the device has finished its work."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
