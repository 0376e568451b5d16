"""A drafter whose confidence is informed, rounds of a fixed K, and their counters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter
from scipy.special import ndtr

from specsim.acceptance.models import Drafts, geometric_entropy_nats, match_lengths
from specsim.acceptance.sources import Counters, Rounds
from specsim.cost.model import ConstantCost
from specsim.io.arrays import Ints
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace

COST = ConstantCost(s_d=1e-3, s_t=8e-3)


@dataclass(frozen=True)
class Uneven:
    """Easy and hard texts and stretches; the drafter's confidence, somewhat too high, tells which."""

    name, source, informed = "uneven", "tests", True

    def draw(self, lengths: Ints, depth: int, rng: np.random.Generator) -> Drafts:
        total = int(lengths.sum())
        text, stretch, token = rng.standard_normal((3, total))
        text = np.repeat(text[: len(lengths)], lengths)
        stretch = lfilter([0.44], [1.0, -0.9], stretch)
        accept_prob = ndtr(0.6 + 0.55 * text + 0.4 * stretch + 0.4 * token)
        match = match_lengths([rng.random(total) < accept_prob] * depth, lengths)
        place = np.minimum(np.arange(total)[:, None] + np.arange(depth), total - 1)
        astray = np.where(np.arange(depth) > match[:, None], 0.7, 1.0)
        confidence = (accept_prob[place] ** 0.6 * astray).astype(np.float32)
        entropy = geometric_entropy_nats(confidence).astype(np.float32)
        return Drafts(match, confidence, confidence, entropy)


def fixed_k_rounds(trace: Trace, k: int) -> Rounds:
    """The rounds of a run that drafts k tokens every time."""
    log = replay(trace, FixedK(k=k), cost_table(trace, COST), log=True).rounds
    assert log is not None
    return Rounds(
        drafted=log.drafted,
        accepted=log.accepted,
        policy=np.full(len(log), f"fixed_k(k={k})"),
        sequence_id=trace.sequence_id[log.sequence],
        t=log.t,
    )


def as_counters(rounds: Rounds) -> Counters:
    """What a server would have counted of these rounds."""
    depth = np.arange(1, int(rounds.drafted.max()) + 1)[:, None]
    return Counters((rounds.drafted >= depth).sum(axis=1), (rounds.accepted >= depth).sum(axis=1))
