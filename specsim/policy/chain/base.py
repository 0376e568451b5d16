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
    top10_confidence: float  # largest of the ten largest draft probabilities, scaled to sum to 1; where recorded


@dataclass(frozen=True)
class ChainPolicy(Policy):
    """Base of every chain policy: how many tokens to draft, one after another.

    A policy is a frozen dataclass of `setting` fields, `max_draft_tokens` (tokens) among them, with the compiled
    functions that `specsim.policy.base` describes. docs/extending.md shows a whole one.

    Examples
    --------
    >>> import specsim
    >>> issubclass(specsim.policies()["adaedl"], specsim.ChainPolicy)
    True
    """

    functions: ClassVar[tuple[str, ...]] = ("initial_state", "keep_drafting", "update")
    keep_drafting: ClassVar[Callable[..., Any]]

    @property
    def drops_refused(self) -> bool:
        """Whether a token after which the policy does not continue is dropped: drafted, but not verified.

        Such a policy is asked about every token, the last one of a draft as well, and `update` is given the verified
        tokens, which may be none.
        """
        return False
