"""Names of array types, a check of axes, and arrays as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.floating[Any]]  # of any width
IntArray = npt.NDArray[np.integer[Any]]
Seconds = Floats
Strings = npt.NDArray[np.str_]


def increases(values: Array) -> bool:
    """Tell whether values strictly increase; unlike differences, comparing does not overflow."""
    return bool((values[1:] > values[:-1]).all())


def finite_or_null(values: Array) -> list[Any]:
    """Make nested lists for a JSON document, which has neither NaN nor infinity."""
    rows = values.astype(object)
    rows[~np.isfinite(values)] = None
    return rows.tolist()
