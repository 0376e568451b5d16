"""The value of an output token to a server, in seconds: the time per token that it achieves at its load.

And drafted tokens handed out over requests: the likeliest first, as many as fit or as pay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import FloatArray, Floats, Ints, Seconds
from specsim.serving.draft_length import DraftRounds, PricedRule, Running

MEMORY = 0.98  # weight of a step relative to the next step at such a batch
CATCH_UP_STEPS = 8  # over which catching up has to pay
SIZES = 32  # powers of two of batches


class Achieved(NamedTuple):
    """Seconds and output tokens of earlier steps, the older the lighter, by the power of two of their batch."""

    seconds: Seconds
    tokens: Floats

    @classmethod
    def nothing(cls) -> Achieved:
        return cls(np.zeros(SIZES), np.zeros(SIZES))


@dataclass(frozen=True)
class ValuedRule(PricedRule):
    """Base of rules that weigh what a token adds to a step against the value of a token (renewal reward).

    The long-run time per token is the least if every step makes value x tokens - seconds the most, where the value is
    that time per token. It is taken from the steps so far at batches of about this size, at first from decoding
    without speculation.
    """

    def value_s(self, state: Achieved, running: Running) -> float:
        """Seconds per output token at this load."""
        size = len(running.request).bit_length()
        plain_s = float(self.verify_s(running, 0)) + self.cost.step_s
        return float((state.seconds[size] + plain_s) / (state.tokens[size] + len(running.request)))

    def switch_s(self, running: Running) -> float:
        """Seconds charged to a step that drafts after steps that did not: its share of what catching up takes.

        Were a step to pay it alone, speculation that was once given up would never be worth resuming; were none to pay
        it, a rule would switch back and forth.
        """
        return self.catch_up_s(running) / CATCH_UP_STEPS

    def achieved(self, before: Achieved, running: Running, rounds: DraftRounds) -> Achieved:
        """What is achieved after a step."""
        size = len(running.request).bit_length()
        here = np.arange(SIZES) == size
        seconds, tokens = self.step_s(running, rounds), float(rounds.emitted.sum())
        return Achieved(
            *(np.where(here, MEMORY * old + new, old) for old, new in zip(before, (seconds, tokens), strict=True))
        )


def likeliest(survival: FloatArray, drafted: Ints) -> tuple[Floats, Ints]:
    """Survival of all drafted tokens, largest first, and the request of each. survival : [R, i]; drafted : [R]

    Of tokens that are as likely, the earlier of a draft comes first, so that any first few are prefixes of drafts.
    """
    by_depth = np.minimum.accumulate(survival, axis=1).T
    made = np.arange(len(by_depth))[:, None] < drafted
    chances = by_depth[made].astype(np.float64)
    order = np.argsort(-chances, kind="stable")
    return chances[order], np.nonzero(made)[1][order]


def hand_out(survival: FloatArray, drafted: Ints, count: int) -> Ints:
    """Tokens of each draft [R] among the `count` likeliest of all drafts."""
    _, request = likeliest(survival, drafted)
    return np.bincount(request[:count], minlength=len(drafted))


def best_count(chances: npt.ArrayLike, added_s: Seconds, value_s: float) -> int:
    """How many of these chances to take, in order, so that value_s x their sum - added_s is the most.

    chances : [n], largest first; added_s : [n + 1], seconds that 0..n of them add; value_s : of a token
    """
    gained = np.concatenate([[0.0], np.cumsum(chances)])
    return int(np.argmax(value_s * gained - added_s))
