"""Tables of quantiles: how marginal distributions are kept."""

from __future__ import annotations

import numpy as np

Table = tuple[float, ...]
KNOTS = np.linspace(-3.5, 3.5, 57)  # normal scores at which tables of quantiles are kept
