"""The input of a round, and the record of a real run, round by round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from realrun.decode.sampling import Sampler
from specsim.io.rng import uniform


class RoundContext(NamedTuple):
    """Identifies a round and how its tokens are chosen, so that every run of the round draws the same numbers.

    sequence : number of the sequence, which keys noise and uniforms
    position : output position of the first token that the round decides
    limit : maximum number of tokens, or levels of a tree, to draft
    seed : of the policy's uniforms
    """

    sampler: Sampler
    sequence: int
    position: int
    limit: int = 0
    seed: int = 0

    def policy_uniform(self, level: int) -> float:
        """Draw the policy's uniform in (0, 1) at this depth of a chain (from 1) or level of a tree (from 0)."""
        return float(uniform(self.seed, self.sequence, self.position, level))


@dataclass(frozen=True)
class Round:
    """A round at output position t, in which `accepted` of `drafted` tokens were accepted.

    verified : drafted tokens in the target's pass: all but those that the policy drops
    last : place of the last accepted token among the verified tokens, from 1; 0 if none was accepted
    step_s : seconds of each draft step, or pass of a tree; part of draft_s
    level_nodes : nodes that each draft pass of a tree ingested
    fed : tokens that the first draft step ingested
    asked : decisions of the policy
    drafter : number of the drafter among several, from 1; 0 with a single drafter, or if nothing was drafted
    refed : tokens of the second pass that restores the target's recurrent states after a rejection; 0 without one
    refeed_s : seconds of that pass; verify_s includes them
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
    refed: int = 0
    refeed_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.draft_s + self.policy_s + self.verify_s + self.other_s


@dataclass(frozen=True)
class Decoded:
    """A decoded sequence; `seconds` covers the rounds, prefill_s the prompt."""

    tokens: list[int]
    rounds: list[Round]
    prefill_s: float
    state: tuple[float, ...] | None = None  # the policy's, after the last round

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    def log(self) -> list[tuple[int, int, int]]:
        """List (t, drafted, accepted) per round."""
        return [(r.t, r.drafted, r.accepted) for r in self.rounds]

    def full_log(self) -> list[tuple[int, ...]]:
        """List (t, drafted, accepted, verified, last, drafter) per round, as `specsim.replaying.rounds.RoundLog`."""
        return [(r.t, r.drafted, r.accepted, r.verified, r.last, r.drafter) for r in self.rounds]
