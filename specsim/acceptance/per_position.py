"""Acceptance model by draft position, as in the counters that servers export."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.acceptance.sources import Source, verified_by_depth
from specsim.acceptance.synthetic import Drafts, match_lengths, uninformed
from specsim.io.arrays import Ints
from specsim.io.errors import InputError


@dataclass(frozen=True)
class PerPosition:
    """alpha[i - 1] in [0, 1]: probability that the i-th drafted token is accepted if all before it were.

    Every output token has a uniform random number; a branch that drafts the token as its i-th is
    accepted there if the number is below alpha_i. Tokens are independent; branches over the same token
    agree as far as their alphas allow. Confidence is alpha_i, as in the i.i.d. model.
    """

    alpha: tuple[float, ...]

    name = "per_position"
    source = "acceptance counters per draft position, as vLLM exports; product-limit estimate, Kaplan and Meier 1958"
    informed = False

    def __post_init__(self) -> None:
        if not self.alpha or not all(0 <= a <= 1 for a in self.alpha):
            raise InputError(f"acceptance model per_position: alpha={self.alpha}; give a list of values in [0, 1]")

    @classmethod
    def fit(cls, source: Source) -> PerPosition:
        """Fit discrete hazards (`sources.verified_by_depth`) down to the deepest verified depth."""
        accepted, verified = verified_by_depth(source)
        seen = int(np.argmin(verified > 0)) if (verified <= 0).any() else len(verified)
        if seen == 0:
            raise InputError("acceptance model per_position: nothing was drafted; give rounds that draft")
        return cls(tuple((accepted[:seen] / verified[:seen]).tolist()))

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        if depth > len(self.alpha):
            raise InputError(
                f"acceptance model per_position has depths up to {len(self.alpha)}, not {depth}; "
                "lower the depth or fit to longer drafts"
            )
        total = int(lengths.sum())
        uniform = rng.random(total)
        accepted = [uniform < alpha for alpha in self.alpha[:depth]]
        return Drafts(match_lengths(accepted, lengths), **uninformed(np.array(self.alpha[:depth]), total))
