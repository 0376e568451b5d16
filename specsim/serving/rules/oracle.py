"""The greedy clairvoyant rule: how much to draft in a step if it were known what is accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specsim.io.arrays import Ints
from specsim.policy.base import setting
from specsim.serving.draft_length import MAX_DRAFT, DraftRounds, Running
from specsim.serving.rules.value import Achieved, ValuedRule


@dataclass(frozen=True)
class Oracle(ValuedRule):
    """Draft as many of the tokens that will be accepted as pay; no engine knows which these are.

    It maximises value x tokens - seconds in every step. The maximum is exact where the seconds of a draft pass are
    concave in its number of requests and depend on nothing else, because then the fewest passes take the least time.
    The value of a token is the time per token that the rule itself achieves at this load. The rule is not an upper
    bound: it is greedy, although the end of a round decides which drafts come next, and its drafter has to read every
    prompt, which no speculation avoids.
    """

    max_draft_tokens: int = setting(8, 1, 255, bounds="depth", doc=MAX_DRAFT)

    name = "oracle"
    source = "this project; renewal reward, Dinkelbach 1967"
    foresees = True
    label = "clairvoyant, greedy"

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
