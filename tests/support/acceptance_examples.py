"""A difficulty model with known parameters, rounds of a fixed K, and a text that no model here would generate."""

from __future__ import annotations

import numpy as np
from scipy.signal import lfilter
from scipy.special import ndtr

from specsim.acceptance.difficulty import KNOTS, Difficulty
from specsim.acceptance.models import geometric_entropy_nats, match_lengths
from specsim.acceptance.sources import Counters, Rounds
from specsim.cost.model import ConstantCost
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import build_trace

COST = ConstantCost(s_d=1e-3, s_t=8e-3)


def difficulty(
    *,
    features: tuple[float, float, float] = (0.15, 0.35, 0.8),
    hidden: tuple[float, float, float] = (0.15, 0.25, 0.9),
    follow: float = 0.3,
) -> Difficulty:
    """Overconfident, with drifting features and drifting hidden difficulty."""
    accept_prob = ndtr((0.5 + 0.7 * KNOTS) / 0.8)
    confidence = accept_prob**0.6
    entropy = np.sort(geometric_entropy_nats(confidence)) * 1.5
    astray = confidence * 0.7
    return Difficulty(
        on_confidence=tuple(confidence.tolist()),
        on_entropy_nats=tuple(entropy.tolist()),
        on_ratio=tuple(np.minimum(1.0, 1.3 * ndtr(KNOTS) + 0.1).tolist()),
        on_correlation=(-0.9, 0.3, -0.3),
        feature_drift=features,
        hit_weight=(1.0, 0.0, 0.0),
        hit_prob=tuple(accept_prob.tolist()),
        hidden_drift=hidden,
        off_confidence=tuple(astray.tolist()),
        off_entropy_nats=tuple(np.sort(geometric_entropy_nats(astray)).tolist()),
        off_ratio=(1.0,) * len(KNOTS),
        off_correlation=(-0.9, 0.0, 0.0),
        off_follow=follow,
        off_common=0.2,
        miss_score=tuple((KNOTS * 0.9 - 0.5).tolist()),
    )


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


def softmax_text(seed: int, sequences: int = 60, tokens: int = 150, depth: int = 8) -> Trace:
    """Drafts from real distributions over 20 tokens, whose sharpness drifts along the text and between texts.

    Confidence and entropy are those of the distribution. The target agrees with its mode less
    often than the mode's probability says, and after an agreement more often. A branch that has
    missed goes on with flatter distributions.
    """
    rng = np.random.default_rng(seed)
    total = sequences * tokens
    drift = lfilter([1.0], [1.0, -0.9], rng.laplace(size=(sequences, tokens)) * 0.35, axis=1)
    sharpness = np.exp(0.6 + drift + 0.5 * rng.standard_normal((sequences, 1))).ravel()

    def statistics(sharp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = sharp[..., None] * rng.standard_normal((*sharp.shape, 20))
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return p.max(axis=-1), -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1)

    confidence, entropy = statistics(sharpness)
    hit = np.zeros(total, dtype=bool)
    draw = rng.random(total)
    for p in range(total):
        bonus = 0.1 if p > 0 and hit[p - 1] else 0.0
        hit[p] = draw[p] < 0.75 * confidence[p] + 0.1 + bonus
    lengths = np.full(sequences, tokens)
    match = match_lengths([hit] * depth, lengths).astype(int)
    off = statistics(np.repeat(0.7 * sharpness[:, None], depth, axis=1))
    place = np.arange(total)[:, None] + np.arange(depth)
    astray = np.arange(depth) > match[:, None]
    place = np.minimum(place, total - 1)
    miss = np.minimum(np.arange(total) + match, total - 1)[:, None]
    step = np.clip(np.arange(depth) - match[:, None] - 1, 0, depth - 1)
    return build_trace(
        rng,
        hit[place],
        lengths.tolist(),
        confidence=np.where(astray, off[0][miss, step], confidence[place]),
        entropy_nats=np.where(astray, off[1][miss, step], entropy[place]),
    )
