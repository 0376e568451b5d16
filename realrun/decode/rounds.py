"""What a real run did, round by round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Round:
    """One round: at output position t, `drafted` tokens proposed, `accepted` of them kept.

    verified : tokens in the target's pass beside the pending one; all those drafted, of a chain
    last : place of the last accepted token among the verified ones, from 1 on; 0 if none was accepted
    """

    t: int
    drafted: int
    accepted: int
    verified: int
    last: int
    draft_s: float
    policy_s: float
    verify_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.policy_s + self.verify_s + self.other_s


@dataclass(frozen=True)
class Decoded:
    """A decoded sequence; `seconds` covers the rounds, prefill_s what went before."""

    tokens: list[int]
    rounds: list[Round]
    prefill_s: float
    state: Any = None  # the policy's, after the last round

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    def log(self) -> list[tuple[int, int, int]]:
        """(t, drafted, accepted) per round."""
        return [(r.t, r.drafted, r.accepted) for r in self.rounds]

    def tree_log(self) -> list[tuple[int, int, int, int, int]]:
        """(t, drafted, accepted, verified, last) per round."""
        return [(r.t, r.drafted, r.accepted, r.verified, r.last) for r in self.rounds]
