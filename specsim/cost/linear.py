"""Linear costs: a pass takes a fixed time, and more per new token and per cached token, as serving papers print.

A batch of B sequences in lockstep is one pass over B times the tokens and B times the cache; times are those of the
whole batch, each round of which serves every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specsim.arrays import Seconds
from specsim.cost.batches import BatchCostModel, BatchTokens
from specsim.cost.model import MAX_TREE_TOKENS, MIN_SECONDS, check_seconds
from specsim.errors import InputError


@dataclass(frozen=True)
class LinearPass:
    """One model's passes.

    Parameters
    ----------
    fixed_s : float
        Seconds of a pass whatever it holds: reading the weights, launches. Positive.
    token_s : float
        Seconds per new token.
    cached_token_s : float
        Seconds per token in the cache that the new ones attend to.

    Raises
    ------
    InputError
        For a time that is negative, or no fixed one.
    """

    fixed_s: float
    token_s: float = 0.0
    cached_token_s: float = 0.0

    def __post_init__(self) -> None:
        check_seconds(self, "fixed_s", least=MIN_SECONDS)
        check_seconds(self, "token_s", "cached_token_s")

    def seconds(self, n_tokens: int, context: npt.ArrayLike, batch: int) -> Seconds:
        """A pass over n_tokens new tokens of each of `batch` sequences, behind `context` cached ones each."""
        return self.batch_seconds(BatchTokens.alike(batch, n_tokens, context))

    def batch_seconds(self, tokens: BatchTokens) -> Seconds:
        """Passes over ragged batches."""
        return np.asarray(self.fixed_s + tokens.new * self.token_s + tokens.cached * self.cached_token_s)


class BatchPass(Protocol):
    """One model's passes over ragged batches: a `LinearPass`, or one of curves, see `specsim.cost.step_times`."""

    def batch_seconds(self, tokens: BatchTokens) -> Seconds: ...


@dataclass(frozen=True, repr=False)
class LinearCost(BatchCostModel):
    """A target and a drafter with linear passes, and what a step costs beside them.

    Parameters
    ----------
    target, drafter : LinearPass or StepTime
        Of one pass. A draft of K tokens is K passes of the drafter, each over the cache so far.
    step_s : float
        Seconds per engine step beside its passes, such as scheduling: once a round, and once a token without
        speculation.
    round_s : float
        Seconds that a round of speculation takes beside its passes and `step_s`.
    batch : int
        Sequences in lockstep.

    Raises
    ------
    InputError
        For a negative overhead, or a batch below 1.

    References
    ----------
    Of the form: arXiv:2601.11580, fitted to vLLM on an H100.

    Examples
    --------
    >>> from specsim.cost.linear import LinearCost, LinearPass
    >>> cost = LinearCost(target=LinearPass(0.010, 0.001), drafter=LinearPass(0.002), step_s=0.001)
    >>> float(cost.verify(4, 100)), float(cost.draft(3, 100)), float(cost.autoregressive_step(100))
    (0.014, 0.006, 0.012)
    """

    target: BatchPass
    drafter: BatchPass
    step_s: float = 0.0
    round_s: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        check_seconds(self, "step_s", "round_s")
        if self.batch < 1:
            raise InputError(f"cost: batch={self.batch}; give at least 1")

    @property
    def max_tree_tokens(self) -> int:
        return MAX_TREE_TOKENS

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        return self.drafter.batch_seconds(tokens)

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        return self.target.batch_seconds(tokens)
