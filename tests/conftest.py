"""Settings that every test shares; what the kernels' tests ran, gathered from all processes, printed at the end."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from specsim.io.progress import ProgressLines
from tests.support import default_cases

# The first example of a policy compiles its kernel, so a deadline per example means nothing.
settings.register_profile("specsim", deadline=None, print_blob=True)
settings.load_profile("specsim")

WITH_MODELS = ("tests/kernels", "tests/realrun")  # folders whose tests need few compiled policies
RAN = pytest.StashKey[set[tuple[str, str, str]]]()  # (operation, backend, how it ran)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RAN] = set()
    os.environ.pop("COLUMNS", None)  # which processes of a parallel run are given, and tables would keep to


@pytest.fixture(scope="session", autouse=True)
def _silence() -> Iterator[None]:
    """What takes half a minute differs by machine; commands say it."""
    with mock.patch("specsim.cli.console.ProgressLines", partial(ProgressLines, interval_s=1e6)):
        yield


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def kernels_ran(pytestconfig: pytest.Config) -> set[tuple[str, str, str]]:
    return pytestconfig.stash[RAN]


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    default_cases.mark_the_others(items)
    if on_gpu := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    # Of two processes, one runs models while the other compiles the policies, so that few are compiled twice.
    items.sort(key=lambda item: not item.nodeid.startswith(WITH_MODELS))
    if config.args == config.getini("testpaths") and (wrong := default_cases.unknown(item.nodeid for item in items)):
        raise pytest.UsageError(f"{default_cases.FILE.name} names what is no test: {'; '.join(wrong)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests with Python's garbage collector off, which saves a third of the time; exempt what was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes
        session.config.workeroutput["kernels"] = sorted(session.config.stash[RAN])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[RAN].update(map(tuple, getattr(node, "workeroutput", {}).get("kernels", ())))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    ran = config.stash[RAN]
    if not ran:
        return
    import torch

    from speckernels.runtime import dispatch

    terminalreporter.section("kernels: how each backend was tested")
    width = max(map(len, dispatch.OPERATIONS))
    for name in sorted(dispatch.OPERATIONS):
        for backend in dispatch.BACKENDS:
            seen = sorted(how for *what, how in ran if what == [name, backend]) or ["NOT TESTED"]
            terminalreporter.write_line(f"{name:{width}}  {backend:9}  {', '.join(seen)}")
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device here: nothing was run on a GPU")
