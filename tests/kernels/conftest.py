"""Which operation ran in which backend and how: recorded while tests run, printed at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from speckernels import dispatch

_ran: dict[tuple[str, str], set[str]] = defaultdict(set)


def how(backend: str, device: torch.device) -> str:
    """How a backend runs on a device."""
    if device.type == "cuda":
        return f"run on {torch.cuda.get_device_name(device)}"
    return {"reference": "run on the CPU", "triton": "interpreted", "cuda": "host-built"}[backend]


@pytest.fixture(scope="session", autouse=True)
def _record_runs() -> Iterator[None]:
    original = dispatch.implementation

    @cache
    def recording(name: str, backend: str) -> Callable[..., Any]:
        function = original(name, backend)

        def run(*args: Any) -> Any:
            result = function(*args)
            _ran[name, backend].add(how(backend, next(dispatch._devices(args))))
            return result

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "implementation", recording)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def record_compiled() -> Callable[[str, str, str], None]:
    """Note that an operation's backend compiled for an architecture."""
    return lambda name, backend, architecture: _ran[name, backend].add(f"compiled for {architecture}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _ran:
        return
    terminalreporter.section("kernels: how each backend was tested")
    width = max(map(len, dispatch.OPERATIONS))
    for name in sorted(dispatch.OPERATIONS):
        for backend in dispatch.BACKENDS:
            seen = sorted(_ran.get((name, backend), {"NOT TESTED"}))
            terminalreporter.write_line(f"{name:{width}}  {backend:9}  {', '.join(seen)}")
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device here: nothing was run on a GPU")
