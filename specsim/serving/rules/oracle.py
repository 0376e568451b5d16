"""The oracle of a step: how much to draft if it were known what is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.io.arrays import Ints
from specsim.policy.base import setting
from specsim.serving.draft_length import MAX_DRAFT, DraftRounds, Running
from specsim.serving.rules.value import Achieved, ValuedRule


@dataclass(frozen=True)
class Oracle(ValuedRule):
    """Draft, of the tokens that will be accepted, as many as pay: a bound that no engine's rule can know of.

    It maximises value x tokens - seconds of every step, exactly, where a draft pass adds no more for each further
    request and passes differ by their number of requests alone: of all ways to draft so many tokens the fewest passes
    take the least. The value of a token is the time per token that the oracle itself achieves at this load. It does not
    see beyond the step, where a round's end decides which drafts come next.
    """

    max_draft_tokens: int = setting(8, 1, 255, bounds="depth", doc=MAX_DRAFT)

    name = "oracle"
    source = "this project; renewal reward, Dinkelbach 1967"
    foresees = True

    def initial_state(self) -> Achieved:
        return Achieved.nothing()

    def update(self, state: Achieved, running: Running, rounds: DraftRounds) -> Achieved:
        return self.achieved(state, running, rounds)

    def choose(self, state: Achieved, running: Running) -> Ints:
        assert running.match is not None
        most = np.minimum(running.match, self.max_draft_tokens)
        # Passes are filled one after the other, requests with the shortest contexts first.
        by_context = np.argsort(running.cached, kind="stable")
        places = np.arange(int(most.max(initial=0)))[:, None]
        drafting = most[by_context] > places
        in_pass = drafting.cumsum(axis=1)
        place, position = np.nonzero(drafting)  # pass by pass
        request = by_context[position]
        before_s = np.cumsum(self.draft_s(running, places[:, 0], in_pass[:, -1])) if len(places) else np.empty(0)
        pass_s = self.draft_s(running, place, in_pass[drafting])
        added_s = np.append(0.0, np.append(0.0, before_s)[place] + pass_s)
        count = np.arange(len(request) + 1)
        once_s = self.cost.round_s + self.switch_s(running)
        total_s = added_s + self.verify_s(running, count) + np.where(count > 0, once_s, 0.0)
        best = int(np.argmax(self.value_s(state, running) * count - total_s))
        return np.bincount(request[:best], minlength=len(most))
