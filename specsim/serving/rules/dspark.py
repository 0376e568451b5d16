"""DSpark's verification budget, as SGLang and TensorRT-LLM schedule it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from specsim.cost.batches import BatchCost
from specsim.io.arrays import FloatArray, Ints
from specsim.policy.base import Settings, parse_settings, setting
from specsim.serving.draft_length import DraftRounds, PricedRule, Running
from specsim.serving.rules.survival import Survival, fit_survival
from specsim.serving.rules.value import hand_out
from specsim.trace.trace import Trace

LEAST_SURVIVAL = 1e-6  # below which a token is never verified


class Seen(NamedTuple):
    """Requests of the last step [R], and the survival of their drafts then [R, i]."""

    request: Ints
    survival: FloatArray


@dataclass(frozen=True)
class DSpark(PricedRule):
    """Draft K tokens for every request, and verify as many as promise the most tokens per second.

    The number b maximises (R + the b largest chances) / seconds of a step that verifies R + b tokens, where the chances
    are those of an earlier draft of each request, because the engine plans the next step while this one runs: 1 for a
    request without one. The b likeliest tokens of the new drafts are verified. Differences: the step's seconds are the
    cost model's rather than a table's, confidence is calibrated by logistic regression rather than by temperatures, and
    any drafter drafts, though a DSpark drafter makes all K tokens in one pass.

    drafter : its calibrated confidence
    """

    drafter: Survival = dataclasses.field(repr=False)
    max_draft_tokens: int = setting(7, 1, 255, bounds="depth", doc="K, tokens of every draft")
    lag: bool = setting(True, 0, 1, doc="plan by the drafts of the last step rather than this one's")

    name = "dspark"
    source = "DSpark, arXiv:2607.05147; SGLang 0.5.23, dspark_planner.py; TensorRT-LLM, dspark_planner.py"
    learns = True
    features = ("confidence",)

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        return cls(cost, fit_survival(train, "confidence"), **parse_settings(cls, settings))

    @property
    def looks_behind(self) -> bool:
        return not self.lag  # then the budget is of whole drafts of this step

    def initial_state(self) -> Seen:
        return Seen(np.empty(0, dtype=np.int64), np.empty((0, self.max_draft_tokens)))

    def survival(self, trace: Trace) -> FloatArray:
        return self.drafter.of(trace)

    def choose(self, state: Seen, running: Running) -> int:
        return self.max_draft_tokens

    def verify(self, state: Seen, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        likely = np.where(survival >= LEAST_SURVIVAL, survival, 0.0)
        budget = self.budget(running, self.earlier(state, running) if self.lag else likely)
        return hand_out(likely, np.minimum(drafted, (likely > 0).sum(axis=1)), budget)

    def earlier(self, state: Seen, running: Running) -> FloatArray:
        """Survival [R, i] of the requests' drafts in the last step; 1 for those that were not in it."""
        place = {request: at for at, request in enumerate(state.request.tolist())}
        at = np.array([place.get(request, -1) for request in running.request.tolist()])
        survival = np.ones((len(at), self.max_draft_tokens))
        survival[at >= 0] = state.survival[at[at >= 0]]
        return survival

    def budget(self, running: Running, survival: FloatArray) -> int:
        """Drafted tokens to verify in the step."""
        chances = np.sort(survival[survival >= LEAST_SURVIVAL])[::-1]
        sequences, count = len(running.request), np.arange(len(chances) + 1)
        verify_s = self.verify_s(running, np.arange(sequences * self.max_draft_tokens + 1))
        step_s = self.round_s(sequences, running)[-1] - verify_s[-1] + verify_s[count]  # all drafts are K tokens
        promised = sequences + np.concatenate([[0.0], np.cumsum(chances, dtype=np.float64)])
        return int(np.argmax(promised / step_s))

    def update(self, state: Seen, running: Running, rounds: DraftRounds) -> Seen:
        if rounds.survival is None:
            return self.initial_state()
        survival = np.zeros((len(running.request), self.max_draft_tokens))
        survival[:, : rounds.survival.shape[1]] = rounds.survival
        return Seen(running.request, survival)
