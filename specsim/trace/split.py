"""Which sequences tune and which report."""

from __future__ import annotations

import numpy as np

from specsim.arrays import Ints
from specsim.errors import InputError
from specsim.trace.trace import Trace


def split_sequences(trace: Trace, *, tuning_share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Disjoint sequence indices (tuning, hold-out), split within every domain.

    Sequences of one source fall on one side, where the trace knows its sources: texts cut from one file are alike, so
    that what was tuned on one of them would flatter itself on the other. Groups are dealt in a random order to tuning
    until it has its share of the domain's sequences, as nearly as whole groups allow; a source belongs to the domain of
    its first sequence.

    Raises InputError when either part would be empty.
    """
    if not 0 < tuning_share < 1:
        raise InputError(f"tuning_share={tuning_share} is outside (0, 1); choose a share inside")
    rng = np.random.default_rng(seed)
    group = groups(trace)
    first = np.unique(group)  # groups go by their first sequence
    tuning: list[int] = []
    holdout: list[int] = []
    for domain in np.unique(trace.domain):
        members = rng.permutation(first[trace.domain[first] == domain])
        sizes = np.cumsum([0, *((group == one).sum() for one in members)])
        cut = int(np.abs(sizes - round(int(sizes[-1]) * tuning_share)).argmin())
        tuning.extend(np.flatnonzero(np.isin(group, members[:cut])).tolist())
        holdout.extend(np.flatnonzero(np.isin(group, members[cut:])).tolist())
    if not tuning or not holdout:
        of = "" if len(first) == trace.sequences else f" from {len(first)} files"
        raise InputError(
            f"{trace.sequences} sequences{of} cannot be split into tuning and hold-out parts; record more sequences"
        )
    return np.sort(tuning), np.sort(holdout)


def groups(trace: Trace) -> Ints:
    """Of every sequence [S] the index of the first that has its source; its own where no source is known."""
    own = np.arange(trace.sequences)
    if trace.source is None:
        return own
    _, first, which = np.unique(trace.source, return_index=True, return_inverse=True)
    return np.where(trace.source == "", own, first[which])
