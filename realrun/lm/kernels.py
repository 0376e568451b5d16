"""Which kernels a command runs with: ours by `--kernels auto|reference|triton|cuda`, and the library's for prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from speckernels import BACKENDS, Unsupported, use_backend
from speckernels.runtime.dispatch import AUTO, requested
from specsim.errors import InputError

KERNELS = (AUTO, *BACKENDS)
PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def use_kernels(name: str) -> Iterator[None]:
    """Run the block with these kernels; "auto" takes the best ones that the device has.

    Named kernels are used on the CPU as well: interpreted or on emulated threads, with the
    static cache that goes with them, so that a run on a GPU can be repeated without one.
    Raises InputError for an unknown name, or where the named kernels cannot do the work.
    """
    if name not in KERNELS:
        raise InputError(f"kernels {name!r} are unknown; known: {', '.join(KERNELS)}")
    try:
        with use_backend(name):
            yield
    except Unsupported as error:
        raise InputError(f"--kernels {name}: {error}; choose other kernels or another --dtype") from None


def named() -> bool:
    """Whether kernels were asked for by name, here or by the environment variable of speckernels."""
    return requested() != AUTO


def planless_attention(device: torch.device) -> AbstractContextManager[None]:
    """Attention without cuDNN inside, which on a GPU prepares a plan for every new pair of lengths.

    Prompts and recordings bring new lengths all the time, and a plan takes tens of milliseconds of the host: CUDA GPUs
    from Hopper on prefer cuDNN since torch 2.11.
    """
    return sdpa_kernel(PLANLESS) if device.type == "cuda" else nullcontext()
