"""Which operation ran in which backend and how: noted while tests run, printed at the end by tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import speckernels
from speckernels.runtime import build, dispatch, launch


def how(backend: str, device: torch.device) -> str:
    """How a backend runs on a device."""
    if device.type == "cuda":
        return f"run on {torch.cuda.get_device_name(device)}"
    return {"reference": "run on the CPU", "triton": "interpreted", "cuda": "host-built"}[backend]


@pytest.fixture(scope="session", autouse=True)
def _record_runs(kernels_ran: set[tuple[str, str, str]]) -> Iterator[None]:
    original = dispatch.implementation

    @cache
    def recording(name: str, backend: str) -> Callable[..., Any]:
        function = original(name, backend)

        def run(*args: Any) -> Any:
            result = function(*args)
            kernels_ran.add((name, backend, how(backend, next(dispatch._devices(args)))))
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "implementation", recording)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def record_compiled(kernels_ran: set[tuple[str, str, str]]) -> Callable[[str, str, str], None]:
    """Note that an operation's backend compiled for an architecture."""
    return lambda name, backend, architecture: kernels_ran.add((name, backend, f"compiled for {architecture}"))


@pytest.fixture
def fresh_libraries() -> Iterator[None]:
    """Forget loaded libraries before and after the test."""
    caches = (build._loaded, launch._entry)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture(params=speckernels.BACKENDS)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each backend in turn."""
    with speckernels.use_backend(request.param):
        yield
