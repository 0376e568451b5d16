"""A verification budget over all requests, in as many tokens or as many as pay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from specsim.cost.batches import BatchCost
from specsim.io.arrays import Bools, FloatArray, Ints
from specsim.policy.base import Settings, parse_settings, setting
from specsim.serving.draft_length import MAX_DRAFT, DraftRounds, Running
from specsim.serving.rules.survival import Survival, fit_survival
from specsim.serving.rules.value import MEMORY, Achieved, ValuedRule, best_count, hand_out, likeliest
from specsim.trace.trace import Trace

PRIOR_TOKENS = 20.0  # acceptances that the calibration counts for, against those that the server has seen


class Learned(NamedTuple):
    """What the server achieved and accepted, what confidence foretold of that, and the last steps without drafts."""

    achieved: Achieved
    accepted: float
    foretold: float
    idle: int

    @property
    def factor(self) -> float:
        """Accepted tokens of this server's text over what the calibration expects."""
        return (self.accepted + PRIOR_TOKENS) / (self.foretold + PRIOR_TOKENS)


@dataclass(frozen=True)
class Budget(ValuedRule):
    """Draft and verify the tokens of all requests that are likeliest to be accepted, while they pay for themselves.

    A token pays if the chance that it and all before it are accepted, times the value of a token, exceeds what it adds
    to the step: to a draft pass and to verification. The value is the time per output token that the server achieves at
    this load (renewal reward), as of the policy renewal_stop. Before a draft, the chances are those of any draft; after
    each pass they follow the drafter's confidence, calibrated on the tuning sequences and scaled by what this server's
    text has accepted. Where drafts do not pay, a token is tried at first, and then so seldom that it takes
    `trial_share` of the time. With a `budget`, the tokens verified are that many, whatever they cost.

    drafter : its calibrated confidence
    """

    drafter: Survival = dataclasses.field(repr=False)
    budget: int = setting(0, 0, 1_000_000, doc="drafted tokens to verify in a step; 0: as many as pay")
    max_draft_tokens: int = setting(8, 1, 255, bounds="depth", doc=MAX_DRAFT)
    trial_share: float = setting(0.005, 0.0, 1.0, doc="share of the time to try drafts where they do not pay")

    name = "budget"
    source = "greedy by survival: TETRIS, arXiv:2502.15197, and DSpark, arXiv:2607.05147; value by renewal reward"
    learns = True
    features = ("prob", "confidence", "entropy_nats")

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        return cls(cost, fit_survival(train), **parse_settings(cls, settings))

    @property
    def looks_behind(self) -> bool:
        return not self.budget  # as many as pay, of whole drafts

    def initial_state(self) -> Learned:
        return Learned(Achieved.nothing(), 0.0, 0.0, 0)

    def survival(self, trace: Trace) -> FloatArray:
        return self.drafter.of(trace)

    def choose(self, state: Learned, running: Running) -> int:
        if self.budget or self.pays(state, running):
            return self.max_draft_tokens
        plain_s, trial_s, *_ = self.round_s(len(running.request), running)
        rested = self.trial_share * state.idle * plain_s >= trial_s - plain_s
        return int(rested or state.foretold < PRIOR_TOKENS)

    def pays(self, state: Learned, running: Running) -> bool:
        """Whether drafts of some length pay for themselves in all."""
        took_s = self.round_s(len(running.request), running)
        took_s = took_s + np.where(np.arange(len(took_s)) > 0, self.switch_s(running), 0.0)
        chances = len(running.request) * self.drafter.curve[: self.max_draft_tokens]
        return best_count(chances, took_s - took_s[0], self.worth_s(state, running)) > 0

    def worth_s(self, state: Learned, running: Running) -> float:
        """Seconds that a foretold acceptance is worth."""
        return state.factor * self.value_s(state.achieved, running)

    def go_on(self, state: Learned, running: Running, survival: FloatArray, drafted: Ints, going: Bools) -> Bools:
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
        paying = best_count(np.sort(ahead[order])[::-1], added_s, self.worth_s(state, running))
        chosen[order[:paying]] = True
        return chosen

    def verify(self, state: Learned, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        if self.budget:
            return hand_out(survival, drafted, self.budget)
        if not self.pays(state, running):
            return drafted
        chances, _ = likeliest(survival, drafted)
        added_s = self.verify_s(running, np.arange(len(chances) + 1))
        paying = best_count(chances, added_s, self.worth_s(state, running))
        return hand_out(survival, drafted, paying)

    def update(self, state: Learned, running: Running, rounds: DraftRounds) -> Learned:
        achieved = self.achieved(state.achieved, running, rounds)
        if rounds.survival is None:
            return state._replace(achieved=achieved, idle=state.idle + 1)
        verified = np.arange(rounds.survival.shape[1]) < rounds.verified[:, None]
        foretold = float(rounds.survival[verified].sum())
        accepted = float(rounds.accepted.sum())
        return Learned(achieved, MEMORY * state.accepted + accepted, MEMORY * state.foretold + foretold, 0)
