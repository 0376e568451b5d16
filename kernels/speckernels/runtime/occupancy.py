"""Number of thread blocks that a GPU runs at once, by which the work is divided."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from speckernels.runtime import build

ASSUMED_MULTIPROCESSORS = 132  # H100 and H200; for tensors of the CPU


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def block_slots(device: torch.device, source: str, function: str, *variant: int) -> int:
    """Number of blocks of a kernel that run at once, by the driver or, without a GPU, by the source's bounds.

    function : function of `source`.cu that returns the blocks per multiprocessor of a variant of the kernel
    """
    index = None
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
    entry = getattr(build.load(source, index), function)
    entry.restype, entry.argtypes = ctypes.c_int, [ctypes.c_int64] * len(variant)
    if index is None:
        blocks: int = entry(*variant)
    else:
        with torch.cuda.device(index):
            blocks = entry(*variant)
    return blocks * multiprocessors(device)
