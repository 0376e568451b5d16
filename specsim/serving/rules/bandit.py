"""BanditSpec over draft lengths: an upper confidence bound of each K's speedup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specsim.io.arrays import Floats
from specsim.policy.base import setting
from specsim.serving.draft_length import MAX_DRAFT, DraftRounds, PricedRule, Running


class Arms(NamedTuple):
    """Sum of the gains of steps at each K, and steps at each K, from 0."""

    gains: Floats
    steps: Floats


@dataclass(frozen=True)
class Bandit(PricedRule):
    """The K of the highest upper confidence bound, each tried once first; K = 0 is one of them.

    The bound is the mean gain plus width sqrt(log n / n_K), n steps in all and n_K at this K. A step's gain is how many
    times as many tokens it emits per second as a step without speculation. Differences: BanditSpec's reward is the
    accepted length, and its arms do not turn speculation off.
    """

    max_draft_tokens: int = setting(8, 1, 255, bounds="depth", doc=MAX_DRAFT)
    width: float = setting(0.5, 0.0, 100.0, doc="of the confidence bound, in speedup")
    discount: float = setting(1.0, 0.5, 1.0, doc="what a step's gain keeps with every step")

    name = "bandit"
    source = "Hou et al. 2025 (BanditSpec), arXiv:2505.15141, UCBSpec"

    def initial_state(self) -> Arms:
        return Arms(*np.zeros((2, self.max_draft_tokens + 1)))

    def choose(self, state: Arms, running: Running) -> int:
        untried = np.flatnonzero(state.steps == 0)
        if untried.size:
            return int(untried[-1])  # the longest first
        spread = np.sqrt(np.log(max(state.steps.sum(), 1.0)) / state.steps)
        return int(np.argmax(state.gains / state.steps + self.width * spread))

    def update(self, state: Arms, running: Running, rounds: DraftRounds) -> Arms:
        k = self.choose(state, running)
        plain_s = self.round_s(len(running.request), running)[0]
        rate = float(rounds.emitted.sum()) / len(running.request)
        here = np.arange(len(state.steps)) == k
        gain = rate * plain_s / self.step_s(running, rounds)
        return Arms(self.discount * state.gains + here * gain, self.discount * state.steps + here)
