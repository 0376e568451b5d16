"""Which sequences tune and which report."""

from __future__ import annotations

import numpy as np

from specsim.arrays import Ints
from specsim.errors import InputError
from specsim.trace.trace import Trace


def split_sequences(trace: Trace, *, tuning_share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Disjoint sequence indices (tuning, hold-out), split within every domain.

    Raises InputError when either part would be empty.
    """
    if not 0 < tuning_share < 1:
        raise InputError(f"tuning_share={tuning_share} is outside (0, 1); choose a share inside")
    rng = np.random.default_rng(seed)
    tuning: list[int] = []
    holdout: list[int] = []
    for domain in np.unique(trace.domain):
        members = rng.permutation(np.flatnonzero(trace.domain == domain))
        cut = round(len(members) * tuning_share)
        tuning.extend(members[:cut].tolist())
        holdout.extend(members[cut:].tolist())
    if not tuning or not holdout:
        raise InputError(
            f"{trace.sequences} sequences cannot be split into tuning and hold-out parts; record more sequences"
        )
    return np.sort(tuning), np.sort(holdout)
