"""Servers that answer as real ones did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.http_server import serving


@pytest.fixture
def replaying() -> Iterator[Callable[[str], tuple[str, list[dict[str, Any]]]]]:
    """Start a server that replays an engine's recording; returns its address, and what it is asked."""
    with ExitStack() as servers:

        def start(engine: str) -> tuple[str, list[dict[str, Any]]]:
            server = servers.enter_context(serving(engine))
            return server.url, server.asked

        yield start
