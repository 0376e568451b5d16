"""Tables of quantiles: how marginal laws are kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Table = tuple[float, ...]
KNOTS = np.linspace(-3.5, 3.5, 57)  # normal scores at which tables of quantiles are kept
