"""I.i.d. acceptance model: every drafted token is accepted with the same probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.acceptance.synthetic import Drafts, match_lengths, uninformed
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class IID:
    """Independent acceptance with probability alpha in [0, 1], given that the draft prefix was accepted.

    Confidence is alpha everywhere and entropy that of a geometric distribution with this mode, so
    neither tells a policy which tokens will be accepted.
    """

    alpha: float

    name = "iid"
    source = "Leviathan et al. 2023, arXiv:2211.17192, section 3.1"
    informed = False

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"acceptance model iid: alpha={self.alpha} is outside [0, 1]; choose a value inside")

    @classmethod
    def fit(cls, source: Source) -> IID:
        """Fit alpha by maximum likelihood: accepted over verified tokens, also for rounds with a = k.

        mean(a) / mean(k) would count tokens after a rejection as rejected and underestimate alpha.
        In a dense trace every output token is verified once, as the first of a draft.
        """
        if isinstance(source, Trace):
            drafted = source.draft_limit > 0
            if not drafted.any():
                raise InputError("acceptance model iid: no token of this trace could be drafted; record longer outputs")
            return cls(float((source.match_len > 0)[drafted].mean()))
        accepted, verified = verified_by_depth(source)
        return cls(float(accepted.sum() / verified.sum()))

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        total = int(lengths.sum())
        accepted = rng.random(total) < self.alpha
        return Drafts(match_lengths([accepted] * depth, lengths), **uninformed(np.full(depth, self.alpha), total))
