"""Sums of a replay per sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from specsim.io.arrays import Ints, Seconds

PARTS = ("draft", "policy", "verify", "other")  # of a round's seconds


class Sums(NamedTuple):
    """Arrays over sequences, to which a kernel adds.

    num_rounds, drafted, accepted, policy_steps : int64; policy_steps counts how often the policy was asked
    verified : int64, tokens in the target's passes beside the pending ones
    truncated : int64, rounds that asked for more than the recorded trees hold
    draft_s, policy_s, verify_s, other_s : float64
    """

    num_rounds: Ints
    drafted: Ints
    accepted: Ints
    policy_steps: Ints
    verified: Ints
    truncated: Ints
    draft_s: Seconds
    policy_s: Seconds
    verify_s: Seconds
    other_s: Seconds

    @staticmethod
    def zeros(*shape: int) -> Sums:
        arrays: Any = (np.zeros(shape, np.float64 if name.endswith("_s") else np.int64) for name in Sums._fields)
        return Sums(*arrays)

    def at(self, which: Any) -> Sums:
        """Views of these sequences' sums."""
        return Sums(*(values[which] for values in self))

    @property
    def seconds(self) -> Seconds:
        """[..., 4], in draft, policy, verify, other."""
        return np.stack([self.draft_s, self.policy_s, self.verify_s, self.other_s], axis=-1)
