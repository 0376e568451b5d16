"""What a round is given, and what a real run did, round by round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from realrun.decode.sampling import Sampler
from specsim.rng import uniform


class RoundContext(NamedTuple):
    """Which round it is, and how its tokens are chosen; with these, every run of the round draws the same numbers.

    sequence : number of the sequence, which keys noise and uniforms
    position : output position of the first token that the round decides
    limit : most tokens, or levels of a tree, that may be drafted
    seed : of the policy's own uniforms
    """

    sampler: Sampler
    sequence: int
    position: int
    limit: int = 0
    seed: int = 0

    def policy_uniform(self, level: int) -> float:
        """The policy's uniform in (0, 1) at this depth of a chain (from 1) or level of a tree (from 0)."""
        return float(uniform(self.seed, self.sequence, self.position, level))


@dataclass(frozen=True)
class Round:
    """One round: at output position t, `drafted` tokens proposed, `accepted` of them kept.

    verified : tokens in the target's pass beside the pending one; of a chain all but what its policy drops
    last : place of the last accepted token among the verified ones, from 1 on; 0 if none was accepted
    step_s : seconds of each draft step, or pass of a tree; part of draft_s
    level_nodes : nodes that each draft pass of a tree ingested
    fed : tokens that the first draft step ingested
    asked : decisions of the policy
    drafter : of several, which one drafted, from 1 on; 0 where there is one, or nothing was drafted
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
    step_s: tuple[float, ...] = ()
    level_nodes: tuple[int, ...] = ()
    fed: int = 0
    asked: int = 0
    drafter: int = 0

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

    def full_log(self) -> list[tuple[int, ...]]:
        """The same and the drafter, as `specsim.replaying.rounds.RoundLog` has them behind the sequence."""
        return [(*row, one.drafter) for row, one in zip(self.tree_log(), self.rounds, strict=True)]
