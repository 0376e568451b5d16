"""Choose the kernels: specsim's by `--kernels auto|reference|triton|cuda`, and torch's attention for prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from speckernels import BACKENDS, Unsupported, use_backend
from speckernels.runtime.dispatch import AUTO, requested
from specsim.io.errors import InputError

KERNELS = (AUTO, *BACKENDS)
PLANLESS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def use_kernels(name: str) -> Iterator[None]:
    """Run the block with these kernels; "auto" takes the best kernels that the device has.

    Named kernels are used on the CPU as well: interpreted or on emulated threads, and with static caches, so that a
    run on a GPU can be repeated without a GPU. Raises InputError for an unknown name, or if the named kernels do not
    support the work.
    """
    if name not in KERNELS:
        raise InputError(f"kernels {name!r} are unknown; known: {', '.join(KERNELS)}")
    try:
        with use_backend(name):
            yield
    except Unsupported as error:
        raise InputError(f"--kernels {name}: {error}; choose other kernels or another --dtype") from None


def named() -> bool:
    """Check whether kernels were chosen by name, here or by the environment variable of speckernels."""
    return requested() != AUTO


def planless_attention(device: torch.device) -> AbstractContextManager[None]:
    """Run the block's attention without cuDNN, which prepares a plan for every new pair of lengths.

    Prompts and recordings bring new lengths all the time, and a plan takes tens of milliseconds of the host. Since
    torch 2.11, GPUs from Hopper on prefer cuDNN.
    """
    return sdpa_kernel(PLANLESS) if device.type == "cuda" else nullcontext()
