"""Every drafted token is accepted with the same probability, whatever came before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.acceptance.synthetic import Drafts, match_lengths, plain, uninformed
from specsim.arrays import Ints
from specsim.errors import InputError
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class IID:
    """alpha in [0, 1], the acceptance probability of a token whose draft prefix was accepted.

    Assumes that acceptances at different output tokens are independent. Confidence is alpha at every
    place, entropy that of a geometric distribution with such a mode, so policies that look at
    them decide blindly.
    """

    alpha: float

    name = "iid"
    source = "Leviathan et al. 2023, arXiv:2211.17192, section 3.1"
    informed = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"acceptance model iid: alpha={self.alpha} is outside [0, 1]; choose one inside")

    @classmethod
    def fit(cls, source: Source) -> IID:
        """Accepted over verified tokens: the maximum-likelihood estimate, also where a = k censors.

        mean(a) / mean(k) would take tokens after a rejection for rejected ones and come out low.
        In a dense trace every output token is verified once, as the first of a draft.
        """
        if isinstance(source, Trace):
            drafted = source.draft_limit > 0
            if not drafted.any():
                raise InputError("acceptance model iid: no output token of this trace could be drafted; record longer")
            return cls(float((source.match_len > 0)[drafted].mean()))
        accepted, verified = verified_by_depth(source)
        return cls(float(accepted.sum() / verified.sum()))

    def parameters(self) -> dict[str, Any]:
        return plain(self)

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        total = int(lengths.sum())
        accepted = rng.random(total) < self.alpha
        return Drafts(match_lengths([accepted] * depth, lengths), **uninformed(np.full(depth, self.alpha), total))
