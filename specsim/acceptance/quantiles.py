"""Marginal distributions as tables of quantiles."""

from __future__ import annotations

import numpy as np

Table = tuple[float, ...]
KNOTS = np.linspace(-3.5, 3.5, 57)  # normal scores of the quantiles
