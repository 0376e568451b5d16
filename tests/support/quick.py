"""Measurements of costs with the fewest samples, where a test is of what is done with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import realrun.measure.probe
import realrun.measure.profile


@contextmanager
def quick_measurements() -> Iterator[None]:
    """End the profiles and probes of experiments after the fewest sweeps."""
    with (
        mock.patch.object(realrun.measure.profile, "LIMIT_S", 0.0),
        mock.patch.object(realrun.measure.probe, "LIMIT_S", 0.0),
    ):
        yield
