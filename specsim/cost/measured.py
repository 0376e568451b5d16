"""Checks of measured axes and tables, as profiles, batch profiles and grids have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specsim.cost.model import MAX_SECONDS, MIN_SECONDS
from specsim.io.arrays import Ints, Seconds, increases
from specsim.io.errors import InputError

MAX_CONTEXT = 2**31  # tokens


def axis(values: Sequence[int], name: str, advice: str, *, least: int = 0) -> Ints:
    """An increasing axis from `least` on or above; InputError calls it `name`."""
    array = np.asarray(values, dtype=np.int64)
    if not array.size or array[0] < least or array[-1] >= MAX_CONTEXT or not increases(array):
        raise InputError(f"{name} are not an increasing list from {least} on; {advice}")
    return array


def table(values: Any, shape: Sequence[int | None], name: str, advice: str, *, positive: bool = False) -> Seconds:
    """A table of seconds of this shape, in which None stands for any length; InputError calls it `name`."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except ValueError:
        raise InputError(f"{name} has rows of several lengths; {advice}") from None
    if (
        array.ndim != len(shape)
        or not array.size
        or any(length not in (None, own) for own, length in zip(array.shape, shape, strict=True))
    ):
        raise InputError(f"{name} does not fit the axes of the profile; {advice}")
    if not ((array >= (MIN_SECONDS if positive else 0)) & (array <= MAX_SECONDS)).all():
        raise InputError(f"{name}: a time is {'not positive' if positive else 'negative'} or not finite; {advice}")
    return array
