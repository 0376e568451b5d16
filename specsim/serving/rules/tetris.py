"""TETRIS: a fixed number of drafted tokens is verified, the likeliest over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.io.arrays import FloatArray, Ints
from specsim.policy.base import setting
from specsim.serving.draft_length import DraftLengthRule, Running, State
from specsim.serving.rules.allocation import hand_out
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class Tetris(DraftLengthRule):
    """Draft K tokens and a few more for every request, and verify the K per request that are likeliest over the batch.

    A token's chance is the product of the drafter's probabilities of its draft so far, as they are.
    """

    k: int = setting(3, 1, 128, doc="verified tokens per request, on average over the batch")
    extra: int = setting(2, 0, 127, doc="tokens drafted beyond that, from which to choose")

    name = "tetris"
    source = "Wu et al. 2025 (TETRIS), arXiv:2502.15197, Algorithm 1"

    @property
    def max_draft_tokens(self) -> int:
        return self.k + self.extra

    def survival(self, trace: Trace) -> FloatArray:
        return np.cumprod(trace.prob[:, : self.max_draft_tokens], axis=1)

    def choose(self, state: State, running: Running) -> int:
        return self.max_draft_tokens

    def verify(self, state: State, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        return hand_out(survival, drafted, self.k * len(drafted))
