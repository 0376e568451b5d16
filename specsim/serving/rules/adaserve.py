"""AdaServe's order of tokens: first to requests that are behind their own limit on the time per token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.io.arrays import Bools, FloatArray
from specsim.serving.draft_length import Running
from specsim.serving.rules.budget import Budget


@dataclass(frozen=True)
class AdaServe(Budget):
    """As many tokens as `budget` takes, but first for requests that are behind their own limit on the time per token.

    First come as many tokens of a draft as make its expected output cover what the request needs by the end of the
    step; then all others by their chance. Without limits this is `budget`. Differences: drafts are chains, the tokens
    are as many as pay in place of a fixed number (unless `budget` is set), the step is taken to last as long as the
    last one, and a request that no draft can bring back does not come first, because it would take the tokens of those
    that one can.
    """

    name = "adaserve"
    source = "Li et al. 2025 (AdaServe), arXiv:2501.12162, SLO-customized speculative decoding"
    keeps_limits = True

    def first(self, running: Running, survival: FloatArray, further: int = 0) -> Bools:
        if running.needed is None:
            return super().first(running, survival)
        expected, needed = 1 + np.cumsum(survival, axis=1), running.needed[:, None]
        reachable = expected[:, -1:] + further * survival[:, -1:] >= needed
        before = np.column_stack([np.ones(len(expected)), expected[:, :-1]])
        return np.asarray(reachable & (before < needed) & (survival > 0))
