"""What a chain policy is: after which drafted token to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from specsim.policy.base import Policy


class Step(NamedTuple):
    """What is known about the token just drafted."""

    prob: float  # draft probability of the drafted token
    confidence: float  # largest draft probability
    entropy_nats: float  # entropy of the draft distribution
    score: float  # acceptance predictor's output, where the drafter has one


@dataclass(frozen=True)
class ChainPolicy(Policy):
    """Base of every chain policy: how many tokens to draft, one after another.

    A policy is a frozen dataclass of `setting` fields, `max_draft_tokens` (tokens) among them, with the compiled
    functions that `specsim.policy.base` describes. The README shows a whole one.

    Examples
    --------
    >>> import specsim
    >>> issubclass(specsim.policies()["adaedl"], specsim.ChainPolicy)
    True
    """

    functions = ("initial_state", "keep_drafting", "update")
    keep_drafting: ClassVar[Callable[..., Any]]
