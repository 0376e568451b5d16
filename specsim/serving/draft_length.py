"""Draft lengths that follow the load: K for all sequences of a batch, chosen anew in every round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.io.arrays import Ints, Seconds
from specsim.io.errors import InputError

State = Any  # of a rule: what it has seen so far


class DraftLengthRule(Protocol):
    """Frozen settings, and pure functions of a state that belongs to the server, not to a sequence."""

    @property
    def label(self) -> str: ...

    @property
    def max_draft_tokens(self) -> int: ...

    def initial_state(self) -> State: ...

    def choose(self, state: State, sequences: int, cached_tokens: int) -> int:
        """K of the next round; 0 for a step without speculation."""

    def update(self, state: State, drafted: Ints, accepted: Ints) -> State:
        """The state after a round in which these were drafted and accepted, by sequence."""


@dataclass(frozen=True)
class ScheduledK:
    """A K per batch size, as engines' schedules have it.

    lengths : from a batch of so many sequences on, K; 0 turns speculation off. Has batch 1

    Raises InputError where batch 1 is missing, or a batch or K is none.

    >>> rule = ScheduledK({1: 5, 4: 3, 16: 0})
    >>> [rule.choose(None, sequences, 0) for sequences in (1, 3, 4, 15, 16, 500)]
    [5, 5, 3, 3, 0, 0]
    """

    lengths: Mapping[int, int]

    def __post_init__(self) -> None:
        if 1 not in self.lengths or min(self.lengths) < 1 or min(self.lengths.values()) < 0:
            raise InputError(
                f"schedule {dict(self.lengths)}: give a draft length of 0 or more from batch 1 on, such as 1:5,4:3,16:0"
            )

    @property
    def label(self) -> str:
        return "K by batch " + ",".join(f"{batch}:{k}" for batch, k in sorted(self.lengths.items()))

    @property
    def max_draft_tokens(self) -> int:
        return max(self.lengths.values())

    def initial_state(self) -> State:
        return None

    def choose(self, state: State, sequences: int, cached_tokens: int) -> int:
        return self.lengths[max(batch for batch in self.lengths if batch <= sequences)]

    def update(self, state: State, drafted: Ints, accepted: Ints) -> State:
        return state


def as_schedule(schedule: Mapping[int, int] | str) -> ScheduledK:
    """The rule of a mapping of batches to K, or of its text: "1:5,4:3,16:0"."""
    if not isinstance(schedule, str):
        return ScheduledK(dict(schedule))
    try:
        pairs = [part.split(":") for part in schedule.split(",")]
        lengths = {int(batch): int(k) for batch, k in pairs}
    except ValueError:
        raise InputError(f"schedule {schedule!r} is not a list of BATCH:K; write for example 1:5,4:3,16:0") from None
    if len(lengths) < len(pairs):
        raise InputError(f"schedule {schedule!r} names a batch twice; give each batch once")
    return ScheduledK(lengths)


def fixed_length(k: int) -> ScheduledK:
    """The same K at every batch; 0 is decoding without speculation."""
    return ScheduledK({1: k})


@dataclass(frozen=True)
class TurboSpec:
    """The K that promises the most accepted tokens per second, from a moving estimate of acceptance.

    The expected tokens of a round, (1 - a^(K+1)) / (1 - a) per sequence, over the predicted seconds of such a round at
    the batch and contexts as they are. The estimate is an exponentially weighted share of accepted tokens among
    verified ones. It starts at `accept_prob`, which counts as `prior_tokens` verified tokens, and goes back there while
    nothing is drafted, so that speculation that was given up is tried again; the paper leaves both open.

    cost : what rounds are predicted to take
    max_draft_tokens : largest K
    accept_prob : the estimate before anything is seen, in [0, 1]
    prior_tokens : its weight, in tokens
    memory : weight of a round relative to the next round, in [0, 1)

    References: Liu et al. 2024, TurboSpec (SmartSpec), arXiv:2406.14066: goodput.
    """

    cost: BatchCost
    max_draft_tokens: int
    accept_prob: float = 0.7
    prior_tokens: float = 10.0
    memory: float = 0.95

    def __post_init__(self) -> None:
        if not (0 <= self.accept_prob <= 1 and 0 <= self.memory < 1 and self.prior_tokens > 0):
            raise InputError(
                f"turbospec: accept_prob={self.accept_prob}, memory={self.memory}, prior_tokens={self.prior_tokens}; "
                "expected accept_prob in [0, 1], memory in [0, 1) and prior_tokens > 0"
            )

    @property
    def label(self) -> str:
        return f"turbospec K<={self.max_draft_tokens}"

    def initial_state(self) -> State:
        return 0.0, 0.0  # accepted and verified tokens, the older the lighter

    def choose(self, state: State, sequences: int, cached_tokens: int) -> int:
        accepted, verified = state
        prior = self.prior_tokens
        estimate = (accepted + prior * self.accept_prob) / (verified + prior)
        tokens = mean_tokens_per_round(min(estimate, 1.0), np.arange(self.max_draft_tokens + 1))
        return int(np.argmax(tokens / self._round_s(sequences, cached_tokens)))

    def _round_s(self, sequences: int, cached_tokens: int) -> Seconds:
        """Predicted seconds of a round by K, from 0 on."""
        k = np.arange(self.max_draft_tokens + 1)
        mean = cached_tokens / sequences
        step_s = self.cost.batch_draft(k[:-1], BatchTokens.alike(sequences, 1, mean + k[:-1]))
        draft_s = np.concatenate([[0.0], np.cumsum(step_s)])
        verify_s = self.cost.batch_verify(BatchTokens.alike(sequences, k + 1, mean))
        total: Seconds = draft_s + verify_s + self.cost.step_s + np.where(k > 0, self.cost.round_s, 0.0)
        return total

    def update(self, state: State, drafted: Ints, accepted: Ints) -> State:
        # A rejected token ends what is verified of a draft.
        verified = accepted + (accepted < drafted)
        return self.memory * state[0] + float(accepted.sum()), self.memory * state[1] + float(verified.sum())
