"""Counts of accepted drafts with their uncertainty: requests differ, and some steps draft nothing.

Tokens of a request are not independent: in an easy text most drafts are accepted. The variance of an acceptance rate is
therefore `phi` times that of independent rounds (overdispersion), found from requests, or from intervals of a log.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.acceptance.sources import Counters, Source, longest_rounds, longest_starts, verified_by_depth
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.trace.trace import Trace

# phi of requests that are not told apart: SmolLM2's recorded trace has 6; requests of 40 rounds whose acceptance has a
# standard deviation of 0.18 have 14, of which this covers 9 of 10.
UNKNOWN_PHI = 10.0
# What is believed of phi before requests are compared: it weighs as much as this many requests.
PRIOR_PHI, PRIOR_UNITS = 5.0, 2
# Kinds of drafters that propose nothing where nothing fits; engines do not count such steps as rounds.
MAY_ABSTAIN = ("prompt-lookup", "suffix")


@dataclass(frozen=True)
class Counted:
    """What was counted, by draft depth and by request.

    accepted, verified : tokens [D] by depth; a token is verified if all before it were accepted
    rounds : steps that drafted
    plain_steps : steps that drafted nothing; None if unknown
    unit : "requests", "log intervals", or "" if they were not counted apart
    unit_rounds, unit_accepted : rounds and accepted tokens of every unit [U]
    """

    accepted: Floats
    verified: Floats
    rounds: float
    plain_steps: int | None
    unit: str
    unit_rounds: Floats
    unit_accepted: Floats

    @property
    def rates(self) -> Floats:
        """Acceptance rate of every depth [D], 0 where nothing was verified."""
        return self.accepted / np.maximum(self.verified, 1)

    @property
    def share_drafting(self) -> float:
        """Share of decoding steps that draft; 1 if it is unknown."""
        return self.rounds / (self.rounds + (self.plain_steps or 0))

    @property
    def phi(self) -> float:
        """Variance of the accepted tokens of a round between units, over that of independent rounds; 1 for one unit.

        The numerator is the linearised variance of a ratio of sums over units.
        """
        units = len(self.unit_rounds)
        if units < 2:
            return 1.0
        mean = self.unit_accepted.sum() / self.unit_rounds.sum()
        between = float(((self.unit_accepted - mean * self.unit_rounds) ** 2).sum()) * units / (units - 1)
        at_least = np.cumprod(self.rates)  # P(at least i accepted)
        within = float(((2 * np.arange(len(at_least)) + 1) * at_least).sum() - at_least.sum() ** 2)
        return between / (within * self.unit_rounds.sum()) if within > 0 else 1.0

    def draw_rates(self, draws: int, rng: np.random.Generator, times: int = 1) -> Floats:
        """Draw acceptance rates [draws, D] from their posterior.

        phi has a scaled inverse chi-squared posterior, so that few requests give Student's and not normal tails.

        times : as if so many times the requests had been counted
        """
        units = times * len(self.unit_rounds)
        phi: float | Floats = UNKNOWN_PHI
        if units > 1:
            freedom = PRIOR_UNITS + units - 1
            phi = (PRIOR_UNITS * PRIOR_PHI + (units - 1) * self.phi) / rng.chisquare(freedom, size=(draws, 1))
            phi = np.maximum(phi, 1.0)
        # Jeffreys' prior is divided by phi, too, so that the mean does not depend on it.
        passed, failed = times * self.accepted + 0.5, times * (self.verified - self.accepted) + 0.5
        return rng.beta(passed / phi, failed / phi, size=(draws, len(self.accepted)))


def counted(source: Source) -> Counted:
    """Counts by depth, as deep as was drafted, and by request; InputError if nothing was drafted."""
    accepted, verified = verified_by_depth(source)
    if not len(verified) or verified[0] < 1:
        raise InputError("nothing was drafted; give counts of rounds with drafts")
    if isinstance(source, Counters):
        units = np.array([[own.drafted[0], own.accepted.sum()] for own in source.windows], dtype=np.float64)
        units, unit = units.reshape(-1, 2), "log intervals" if source.windows else ""
        return Counted(accepted, verified, float(source.drafted[0]), source.plain_steps, unit, *units.T)
    sequence, known = None, True
    if isinstance(source, Trace):
        sequence = np.searchsorted(source.offsets, longest_starts(source), side="right")
        source = longest_rounds(source)
    else:
        known = source.t is not None or bool((source.drafted == 0).any())  # an engine may not count empty rounds
        if source.sequence_id is not None:
            names = np.zeros(len(source.drafted)) if source.policy is None else source.policy
            policies, texts = (np.unique(column, return_inverse=True)[1] for column in (names, source.sequence_id))
            sequence = policies * (texts.max() + 1) + texts
    drafts = source.drafted > 0
    units = np.zeros((0, 2))
    if sequence is not None:
        units = np.stack([np.bincount(sequence, drafts), np.bincount(sequence, source.accepted)], axis=1)
        units = units[units[:, 0] > 0]
    plain = int((~drafts).sum()) if known else None
    return Counted(accepted, verified, float(drafts.sum()), plain, "requests" if len(units) else "", *units.T)
