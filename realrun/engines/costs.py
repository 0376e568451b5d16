"""Costs of an engine's rounds, fitted to the seconds that it reports of a few settings, in all and for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsim.io.arrays import Floats, Ints


class Rounds(NamedTuple):
    """A sequence's rounds: passes of the draft model, and drafted tokens that the target verified [R]."""

    passes: Ints
    verified: Ints


class Timed(NamedTuple):
    """A sequence's rounds, the seconds that they took in all, and those of them that went into drafts."""

    rounds: Rounds
    whole_s: float
    draft_s: float


@dataclass(frozen=True)
class EngineCosts:
    """Seconds of an engine's rounds, at the contexts that were timed.

    draft_s, pass_s : a draft takes draft_s and, for every pass of the draft model, pass_s
    verified : tokens of the target's pass beside the pending one, from 0 on
    round_s : seconds of a round of so many beside its draft; between these numbers and beyond the last, linear
    """

    draft_s: float
    pass_s: float
    verified: tuple[int, ...]
    round_s: tuple[float, ...]

    def seconds(self, rounds: Rounds) -> float:
        """Return the seconds of these rounds."""
        drafting = self.draft_s * np.count_nonzero(rounds.passes) + self.pass_s * rounds.passes.sum()
        return float(drafting + (_shares(rounds.verified, self.verified) @ np.array(self.round_s)).sum())


def fit_costs(timed: Sequence[Timed], verified: Sequence[int]) -> EngineCosts:
    """Fit costs by least squares over sequences that were timed in several settings.

    timed : of no speculation, and of several draft lengths
    verified : numbers of verified tokens at which a round's seconds are to be known, 0 and the draft lengths
    """
    places = tuple(sorted({0, *verified}))
    drafts = np.array([[np.count_nonzero(run.rounds.passes), run.rounds.passes.sum()] for run in timed], np.float64)
    draft_s, pass_s = _solved(drafts, [run.draft_s for run in timed])
    counts = np.array([_shares(run.rounds.verified, places).sum(axis=0) for run in timed])
    round_s = _solved(counts, [run.whole_s - run.draft_s for run in timed])
    return EngineCosts(draft_s, pass_s, places, tuple(round_s))


def _solved(counts: Floats, seconds: Sequence[float]) -> list[float]:
    return [float(value) for value in np.linalg.lstsq(counts, np.array(seconds), rcond=None)[0]]


def _shares(verified: Ints, places: Sequence[int]) -> Floats:
    """Compute the weights of the grid's lengths for rounds of these lengths [R, places]: linear, rows sum to 1."""
    known = np.array(places, np.float64)
    if len(known) == 1:
        return np.ones((len(verified), 1))
    left = np.clip(np.searchsorted(known, verified, side="right") - 1, 0, len(known) - 2)
    way = (verified - known[left]) / (known[left + 1] - known[left])
    shares = np.zeros((len(verified), len(known)))
    rows = np.arange(len(verified))
    shares[rows, left], shares[rows, left + 1] = 1 - way, way
    return shares
