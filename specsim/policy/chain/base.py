"""Base of chain policies, which choose after which drafted token to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from specsim.policy.base import Policy, reads_of


class Step(NamedTuple):
    """Statistics of the token just drafted."""

    prob: float  # draft probability of the drafted token
    confidence: float  # largest draft probability
    entropy_nats: float  # entropy of the draft distribution
    score: float  # acceptance predictor's output, if the drafter has a predictor
    top10_confidence: float  # largest of the ten largest draft probabilities, scaled to sum to 1; where recorded


@dataclass(frozen=True)
class ChainPolicy(Policy):
    """Base of every chain policy: how many tokens to draft in sequence.

    A policy is a frozen dataclass of `setting` fields, `max_draft_tokens` (tokens) among them, with the compiled
    functions that `specsim.policy.base` describes. docs/extending.md shows a complete policy.

    Examples
    --------
    >>> import specsim
    >>> issubclass(specsim.policies()["adaedl"], specsim.ChainPolicy)
    True
    """

    functions: ClassVar[tuple[str, ...]] = ("initial_state", "keep_drafting", "update")
    keep_drafting: ClassVar[Callable[..., Any]]
    # Whether the token after which the policy stops is dropped: drafted, but not verified. Such a policy is asked about
    # every token, including the last token of a draft, and `update` gets the number of verified tokens, maybe 0.
    drops_refused: ClassVar[bool] = False

    @classmethod
    def biases_sampled_drafts(cls) -> bool:
        return cls.drops_refused and reads_of(cls.features) == "drawn token"
