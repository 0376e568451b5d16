"""Shorten the profiles and probes that experiments measure, for tests of what follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import realrun.measure.probe
import realrun.measure.profile

FEWEST_SWEEPS = 2  # that have a spread


@contextmanager
def quick_measurements(sweeps: int = FEWEST_SWEEPS) -> Iterator[None]:
    """End the profiles and probes of experiments after this many sweeps."""
    with ExitStack() as stack:
        for module in (realrun.measure.probe, realrun.measure.profile):
            stack.enter_context(mock.patch.multiple(module, LIMIT_S=0.0, LEAST_SWEEPS=sweeps))
        yield
