"""Call a C function of a compiled source on tensors.

C functions take pointers, int64_t and double only, and the stream last, and return a
cudaError_t. With one convention, no call can disagree with its source about types.
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
