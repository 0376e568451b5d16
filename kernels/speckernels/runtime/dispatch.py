"""Choice of the backend that runs an operation, and registration of operations with torch.

An operation is a folder `speckernels/ops/<name>/`. Its `__init__.py` holds the public function,
which checks arguments, and calls `register`; `reference.py`, `triton.py` and `cuda.py` each
have a function of the operation's name with the schema's arguments.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from speckernels.runtime.errors import Unavailable, Unsupported

BACKENDS = ("reference", "triton", "cuda")
AUTO = "auto"
ENVIRONMENT = "SPECKERNELS_BACKEND"  # overrides the choice for a whole process

_library = torch.library.Library("speckernels", "FRAGMENT")
_override: str | None = None
OPERATIONS: list[str] = []


def register(name: str, schema: str, fake: Callable[..., Any]) -> None:
    """Define torch.ops.speckernels.<name>.

    schema : arguments and results, such as "(Tensor parents) -> Tensor"; tensors that are
    written are marked "Tensor(a!)". fake : function that creates results of the right shape and
    type from shapes and types alone.
    """

    def run(*args: Any) -> Any:
        return _run(name, args)

    _library.define(name + schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"speckernels::{name}", fake, lib=_library)
    OPERATIONS.append(name)


def _run(name: str, args: tuple[Any, ...]) -> Any:
    device = args[0].device if isinstance(args[0], torch.Tensor) else next(_devices(args))
    chosen = requested()
    if chosen != AUTO:
        return implementation(name, _known(chosen))(*args)
    for backend in _preferred(device.type)[:-1]:
        try:
            return implementation(name, backend)(*args)
        except Unsupported:
            continue
        except Unavailable as error:
            _warn_once(name, backend, str(error))
    return implementation(name, "reference")(*args)


@cache
def _warn_once(name: str, backend: str, why: str) -> None:
    warnings.warn(f"{name} runs without the {backend} backend: {why}", RuntimeWarning, stacklevel=5)


def _devices(args: tuple[Any, ...]) -> Iterator[torch.device]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg.device
        elif isinstance(arg, (list, tuple)):
            yield from _devices(tuple(arg))


@cache
def implementation(name: str, backend: str) -> Callable[..., Any]:
    """Function of an operation in one backend."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"speckernels.ops.{name}.{backend}"), name)
    return function


@cache
def _preferred(device_type: str) -> tuple[str, ...]:
    """Backends for a device, best first; the last always works."""
    if device_type != "cuda":
        return ("reference",)
    from speckernels.runtime.build import find_nvcc

    backends = ["cuda"] if find_nvcc() else []
    if importlib.util.find_spec("triton"):
        backends.append("triton")
    return (*backends, "reference")


def requested() -> str:
    """Name of the backend set by `use_backend` or the environment, else "auto"."""
    return _override or os.environ.get(ENVIRONMENT) or AUTO


def backend_for(device: torch.device | str) -> str:
    """Name of the backend that operations on this device use, unless it does not support the arguments.

    Parameters
    ----------
    device : device of the tensors

    Returns
    -------
    "reference", "triton" or "cuda"
    """
    chosen = requested()
    return _preferred(torch.device(device).type)[0] if chosen == AUTO else _known(chosen)


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown; known: {AUTO}, {', '.join(BACKENDS)}")
    return backend


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every operation inside the block with this backend; "auto" chooses by device.

    Parameters
    ----------
    backend : "reference", "triton", "cuda" or "auto"

    Returns
    -------
    A context manager.

    Raises
    ------
    ValueError
        For an unknown name. Operations inside raise Unsupported or Unavailable if the backend cannot run them.
    """
    global _override
    before = _override
    _override = backend if backend == AUTO else _known(backend)
    try:
        yield
    finally:
        _override = before
