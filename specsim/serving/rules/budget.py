"""A verification budget over all requests, in as many tokens or as many as pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from specsim.cost.batches import BatchCost
from specsim.io.arrays import Bools, FloatArray, Ints
from specsim.policy.base import parse_settings, setting
from specsim.serving.draft_length import MAX_DRAFT, Running, State
from specsim.serving.rules.allocation import best_count, hand_out, likeliest
from specsim.serving.rules.survival import Survival, fit_survival
from specsim.serving.rules.value import ValuedRule
from specsim.trace.trace import Trace


@dataclass(frozen=True)
class Budget(ValuedRule):
    """Draft and verify the tokens of all requests that are likeliest to be accepted, while they pay for themselves.

    A token pays if the chance that it and all before it are accepted, times the value of a token, exceeds what it adds
    to the step: to a draft pass and to verification. The value is the time per output token that the server achieves at
    this load (renewal reward), as of the policy renewal_stop. Before a draft, the chances are those of any draft; after
    each pass they follow the drafter's confidence, calibrated on the tuning sequences. With a `budget`, the tokens
    verified are that many, whatever they cost.

    drafter : its calibrated confidence
    """

    drafter: Survival = dataclasses.field(repr=False)
    budget: int = setting(0, 0, 1_000_000, doc="drafted tokens to verify in a step; 0: as many as pay")
    max_draft_tokens: int = setting(8, 1, 255, bounds="depth", doc=MAX_DRAFT)

    name = "budget"
    source = "greedy by survival: TETRIS, arXiv:2502.15197, and DSpark, arXiv:2607.05147; value by renewal reward"
    learns = True

    @classmethod
    def fit(cls, settings: Mapping[str, Any], train: Trace, cost: BatchCost) -> Self:
        return cls(cost, fit_survival(train), **parse_settings(cls, settings))

    def survival(self, trace: Trace) -> FloatArray:
        return self.drafter.of(trace)

    def choose(self, state: State, running: Running) -> int:
        if self.budget:
            return self.max_draft_tokens
        took_s = self.round_s(len(running.request), running)
        chances = len(running.request) * self.drafter.curve[: self.max_draft_tokens]
        pays = best_count(chances, took_s - took_s[0], self.value_s(state, running)) > 0
        return self.max_draft_tokens if pays else 0

    def go_on(self, state: State, running: Running, survival: FloatArray, drafted: Ints, going: Bools) -> Bools:
        ahead = np.where(going, self.drafter.ahead(survival), 0.0)
        if self.budget:
            chances, _ = likeliest(survival, drafted)
            least = chances[self.budget - 1] if len(chances) >= self.budget else 0.0
            return going & (ahead > least)
        order = np.argsort(-ahead, kind="stable")[: int(going.sum())]
        count, made = np.arange(len(order) + 1), int(drafted.sum())
        added_s = self.verify_s(running, made + count)
        added_s = added_s - added_s[0]
        added_s = added_s + self.draft_s(running, survival.shape[1], count)
        chosen = np.zeros(len(going), dtype=np.bool_)
        chosen[order[: best_count(ahead[order], added_s, self.value_s(state, running))]] = True
        return chosen

    def verify(self, state: State, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        if self.budget:
            return hand_out(survival, drafted, self.budget)
        chances, _ = likeliest(survival, drafted)
        added_s = self.verify_s(running, np.arange(len(chances) + 1))
        return hand_out(survival, drafted, best_count(chances, added_s, self.value_s(state, running)))
