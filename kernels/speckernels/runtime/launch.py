"""Call a C function of a compiled source on tensors.

C functions take pointers, int64_t and double only, and the stream last, and return a
cudaError_t. With one convention, no call can disagree with its source about types.

Beside it what launches need: counters that tell a launch's blocks which of them finishes last, and the number of blocks
that a GPU runs at once, by which the work is divided.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from speckernels.runtime import build
from speckernels.runtime.errors import Unavailable

# cudaErrorInsufficientDriver, cudaErrorNoKernelImageForDevice, cudaErrorLaunchOutOfResources.
NOT_HERE = (35, 209, 701)


def call(source: str, function: str, *args: Any) -> None:
    """Launch `function` of `source`.cu on the device of its tensors.

    args : tensors (None is a null pointer), ints, floats. Raises RuntimeError with the CUDA
    error's message, Unavailable if this GPU or its driver cannot run the kernel.
    """
    types = tuple(map(type, args))
    tensors = _tensors(types)
    device = args[tensors[0]].device
    index, stream = None, 0
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        stream = torch.cuda.current_stream(index).cuda_stream
    entry = _entry(source, function, index, types)
    values = list(args)
    for position in tensors:
        values[position] = values[position].data_ptr()
    if index is None or index == torch.cuda.current_device():
        code = entry(*values, stream)
    else:  # a launch goes to the current device
        with torch.cuda.device(index):
            code = entry(*values, stream)
    if code:
        kind = Unavailable if code in NOT_HERE else RuntimeError
        raise kind(f"{function} failed: {_error_string(source, index, code)}")


@cache
def _tensors(types: tuple[type, ...]) -> tuple[int, ...]:
    """Positions of tensors among the arguments, cached by signature to keep calls short."""
    return tuple(position for position, kind in enumerate(types) if issubclass(kind, torch.Tensor))


@cache
def _entry(source: str, function: str, index: int | None, types: tuple[type, ...]) -> Any:
    # A separate view of the function per signature, so that two uses cannot overwrite each other's types.
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *map(_c_type, types), ctypes.c_void_p)
    return prototype((function, build.load(source, index)))


def _c_type(kind: type) -> type:
    if issubclass(kind, (torch.Tensor, type(None))):
        return ctypes.c_void_p
    return ctypes.c_double if issubclass(kind, float) else ctypes.c_int64


def _error_string(source: str, index: int | None, code: int) -> str:
    describe = build.load(source, index).speckernels_error_string
    describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return f"{describe(code).decode()} ({code})"


def set_host_order(source: str, seed: int) -> None:
    """Set the order in which emulated threads and blocks run: 0 ascending, 1 descending, else shuffled.

    A result that depends on the order has a race.
    """
    build.load(source, None).speckernels_host_order(ctypes.c_uint(seed))


_FOR_GRAPHS = 1 << 24  # 64 MiB: a grid of models captures millions
_LEAST = 4096

_for_graphs: dict[torch.device, torch.Tensor] = {}
_of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return at least `count` zeros, int32, on the device of `like`; the kernel has to reset them to zero.

    They are reused, because clearing them would be a second launch. Calls of a stream run in sequence
    and share its counters; a captured call may be replayed concurrently with any other, so it
    gets its own permanently.
    """
    if not like.is_cuda:
        return like.new_zeros(count, dtype=torch.int32)
    device = like.device
    if torch.cuda.is_current_stream_capturing():
        rest = _for_graphs.get(device)
        if rest is None or len(rest) < count:  # no call before the capture, or all in use
            return like.new_zeros(count, dtype=torch.int32)
        _for_graphs[device] = rest[count:]
        return rest[:count]
    if device not in _for_graphs:
        _for_graphs[device] = like.new_zeros(_FOR_GRAPHS, dtype=torch.int32)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _of_stream or len(_of_stream[key]) < count:
        _of_stream[key] = like.new_zeros(max(count, _LEAST), dtype=torch.int32)
    return _of_stream[key]


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
