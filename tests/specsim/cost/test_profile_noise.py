"""Profiles drawn within the stated errors of a measured profile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.cost.profile import noisy_profile, profile_from_json

SECONDS: dict[str, Any] = {
    "draft_step": [[0.001, 0.002]],
    "catch_up": [0.0, 0.0],
    "verify": [[0.010, 0.011], [0.012, 0.013]],
    "autoregressive": [0.010, 0.011],
    "policy_step": 0.0,
    "round_overhead": 0.0,
}
WIDTHS = {"draft_step": [[0.04, None]], "verify": [[0.02, 0.08], [0.0, 7.0]], "autoregressive": [0.02, 0.02]}


@pytest.mark.parametrize("used", ["mean_s", "median_s"])
def test_draws_spread_as_the_intervals_say(used: str) -> None:
    """95 % of them lie within the half-width. Costs are read from medians where there are no means."""
    tables = {"median_s": SECONDS, "mean_s": None, used: SECONDS}
    document = {"contexts": [10, 20], "relative_half_width": WIDTHS, **tables}
    rng, exact = np.random.default_rng(0), profile_from_json(document, "given")
    drawn = [profile_from_json(noisy_profile(document, rng), "drawn") for _ in range(3000)]
    for table in ("draft_step", "verify", "autoregressive"):
        true_s = getattr(exact, f"{table}_s")
        moved = np.abs(np.log([getattr(cost, f"{table}_s") / true_s for cost in drawn]))
        widths = np.array(WIDTHS[table], dtype=float)
        for index in np.ndindex(true_s.shape):
            share = (moved[(slice(None), *index)] <= min(widths[index], 1.0)).mean()
            if np.isnan(widths[index]) or widths[index] == 0:  # unknown errors are not drawn
                assert not moved[(slice(None), *index)].any()
            else:
                assert 0.94 < share < 0.96
