"""What no measured cost can be: a round that takes less than the step that it contains."""

from __future__ import annotations

import numpy as np

from specsim.arrays import Seconds
from specsim.errors import InputError

NOISE = 0.05  # share of a step by which a round may measure less
FALL = 0.2  # share by which a longer pass may measure less; on CPUs passes of an even number of rows are 16 % faster


def check_rounds(name: str, round_s: Seconds, step_s: Seconds, what: str = "a round at K = {}") -> None:
    """InputError where rounds are, on average, faster than the step without speculation that each contains.

    A round of K drafts verifies them in a pass of the target that yields one token anyway. Measured profiles have
    noise, so that the mean over contexts is judged, and `NOISE` is let pass; see `disturbances` for single contexts.

    round_s : [K, C], rounds of 1, 2, ... drafts, by context; step_s : [C]
    """
    shares = round_s.mean(axis=1) / step_s.mean()
    k = int(shares.argmin()) if shares.size else 0
    if shares.size and shares[k] < 1 - NOISE:
        raise InputError(
            f"{name}: {what.format(k + 1)} takes {shares[k]:.2f} of a step without speculation, which it "
            "contains; profile again on an idle machine"
        )


def disturbances(round_s: Seconds, step_s: Seconds, verify_s: Seconds) -> list[str]:
    """Notes on costs that something disturbed while they were measured: at single contexts, and between passes.

    round_s : [K, C]; step_s : [C]; verify_s : [N, C], passes over 1, 2, ... tokens
    """
    notes = []
    least = float((round_s / step_s).min(initial=1.0))
    if least < 1 - NOISE:
        notes.append(
            f"at one context a round takes {least:.2f} of a step without speculation, which it contains: the profile "
            "was disturbed, profile again on an idle machine"
        )
    mean_s = verify_s.mean(axis=1)
    fall = float((1 - mean_s / np.maximum.accumulate(mean_s)).max())
    if fall > FALL:
        notes.append(f"verifying more tokens takes up to {100 * fall:.0f} % less: the profile was disturbed")
    return notes
