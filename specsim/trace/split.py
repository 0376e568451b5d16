"""Split sequences into tuning and held-out parts."""

from __future__ import annotations

import numpy as np

from specsim.io.arrays import Ints, Strings
from specsim.io.errors import InputError
from specsim.trace.trace import Trace


def split_sequences(trace: Trace, *, tuning_share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Split the sequences of every domain into disjoint indices (tuning, held-out).

    Sequences of the same source fall on the same side, if the trace knows its sources: texts cut from the same file
    are similar, so settings tuned on some of them would look too good on the others. Groups are dealt to tuning in a
    random order until it has its share of the domain's sequences, as nearly as whole groups allow; a source belongs to
    the domain of its first sequence. Where the domains are too small for that, so that a part would be empty, the
    sequences of all domains are split together.

    Raises InputError when either part would be empty all the same.
    """
    return split_by_domain(trace.domain, trace.source, tuning_share=tuning_share, seed=seed)


def split_by_domain(
    domains: Strings, sources: Strings | None, *, tuning_share: float = 0.5, seed: int = 0
) -> tuple[Ints, Ints]:
    """Split sequences of these domains and sources, [S] each, as `split_sequences` does, before they are recorded."""
    if not 0 < tuning_share < 1:
        raise InputError(f"tuning_share={tuning_share} is outside (0, 1); choose a share inside")
    group = _first_of_source(sources, len(domains))
    first = np.unique(group)  # groups go by their first sequence
    for by in (domains, np.zeros_like(domains)):  # domains may be too small to split each
        tuning, holdout = _split(group, first, by[first], tuning_share, seed)
        if len(tuning) and len(holdout):
            return tuning, holdout
    of = "" if len(first) == len(domains) else f" from {len(first)} files"
    raise InputError(
        f"{len(domains)} sequences{of} cannot be split into tuning and held-out parts at "
        f"tuning_share={tuning_share:g}; give more prompts"
    )


def _split(group: Ints, first: Ints, domains: Strings, tuning_share: float, seed: int) -> tuple[Ints, Ints]:
    """Deal the groups of each domain to (tuning, held-out). group : of each sequence [S]; domains : of groups [G]"""
    rng = np.random.default_rng(seed)
    tuning: list[int] = []
    holdout: list[int] = []
    for domain in np.unique(domains):
        members = rng.permutation(first[domains == domain])
        sizes = np.cumsum([0, *((group == member).sum() for member in members)])
        cut = int(np.abs(sizes - round(int(sizes[-1]) * tuning_share)).argmin())
        tuning.extend(np.flatnonzero(np.isin(group, members[:cut])).tolist())
        holdout.extend(np.flatnonzero(np.isin(group, members[cut:])).tolist())
    return np.sort(np.array(tuning, dtype=np.int64)), np.sort(np.array(holdout, dtype=np.int64))


def groups(trace: Trace) -> Ints:
    """Return, for every sequence [S], the index of the first sequence of its source; its own without a source."""
    return _first_of_source(trace.source, trace.sequences)


def _first_of_source(sources: Strings | None, sequences: int) -> Ints:
    own = np.arange(sequences)
    if sources is None:
        return own
    _, first, which = np.unique(sources, return_index=True, return_inverse=True)
    return np.where(sources == "", own, first[which])
