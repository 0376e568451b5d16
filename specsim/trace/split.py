"""Which sequences tune and which report."""

from __future__ import annotations

import numpy as np

from specsim.io.arrays import Ints, Strings
from specsim.io.errors import InputError
from specsim.trace.trace import Trace


def split_sequences(trace: Trace, *, tuning_share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Disjoint sequence indices (tuning, hold-out), split within every domain.

    Sequences of one source fall on one side, where the trace knows its sources: texts cut from one file are alike, so
    that what was tuned on one of them would flatter itself on the other. Groups are dealt in a random order to tuning
    until it has its share of the domain's sequences, as nearly as whole groups allow; a source belongs to the domain of
    its first sequence.

    Raises InputError when either part would be empty.
    """
    return split_by_domain(trace.domain, trace.source, tuning_share=tuning_share, seed=seed)


def split_by_domain(
    domains: Strings, sources: Strings | None, *, tuning_share: float = 0.5, seed: int = 0
) -> tuple[Ints, Ints]:
    """`split_sequences` of sequences of these domains and sources, [S] each, before there is a trace of them."""
    if not 0 < tuning_share < 1:
        raise InputError(f"tuning_share={tuning_share} is outside (0, 1); choose a share inside")
    rng = np.random.default_rng(seed)
    group = _first_of_source(sources, len(domains))
    first = np.unique(group)  # groups go by their first sequence
    tuning: list[int] = []
    holdout: list[int] = []
    for domain in np.unique(domains):
        members = rng.permutation(first[domains[first] == domain])
        sizes = np.cumsum([0, *((group == one).sum() for one in members)])
        cut = int(np.abs(sizes - round(int(sizes[-1]) * tuning_share)).argmin())
        tuning.extend(np.flatnonzero(np.isin(group, members[:cut])).tolist())
        holdout.extend(np.flatnonzero(np.isin(group, members[cut:])).tolist())
    if not tuning or not holdout:
        of = "" if len(first) == len(domains) else f" from {len(first)} files"
        if len(first) == len(np.unique(domains[first])) > 1:
            raise InputError(
                f"every domain is split into tuning and hold-out parts, and each of these {len(first)} has one "
                f"sequence{of and ' or file'} only; give two of a domain, or leave the domains out"
            )
        raise InputError(
            f"{len(domains)} sequences{of} cannot be split into tuning and hold-out parts at "
            f"tuning_share={tuning_share:g}; record more sequences"
        )
    return np.sort(tuning), np.sort(holdout)


def fold_sequences(trace: Trace, folds: int, *, seed: int = 0) -> list[Ints]:
    """Divide the sequences into folds of disjoint indices; every domain evenly spread.

    Sequences of one source are in one fold. Raises InputError for fewer than 2 folds or more folds than there are
    sequences, or sources.
    """
    group = groups(trace)
    first = np.unique(group)
    if not 2 <= folds <= len(first):
        of = "" if len(first) == trace.sequences else f" from {len(first)} files"
        raise InputError(
            f"folds={folds} cannot divide {trace.sequences} sequences{of}; give a number from 2 to {len(first)}"
        )
    rng = np.random.default_rng(seed)
    dealt = np.concatenate(
        [rng.permutation(first[trace.domain[first] == domain]) for domain in np.unique(trace.domain)]
    )
    return [np.flatnonzero(np.isin(group, dealt[fold::folds])) for fold in range(folds)]


def groups(trace: Trace) -> Ints:
    """Of every sequence [S] the index of the first that has its source; its own where no source is known."""
    return _first_of_source(trace.source, trace.sequences)


def _first_of_source(sources: Strings | None, sequences: int) -> Ints:
    own = np.arange(sequences)
    if sources is None:
        return own
    _, first, which = np.unique(sources, return_index=True, return_inverse=True)
    return np.where(sources == "", own, first[which])
