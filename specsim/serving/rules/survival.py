"""Chances that the first tokens of a draft are all accepted, from a drafter's confidence, calibrated on a trace."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np

from specsim.cost.model import ConstantCost
from specsim.io.arrays import FloatArray, Floats
from specsim.io.errors import InputError
from specsim.learn.calibration import (
    Calibration,
    Signal,
    Tokens,
    calibrate,
    calibrate_features,
    drafted_tokens,
    feature_table,
)
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace

ROWS = 1 << 17  # positions at a time
ENOUGH_TOKENS = 200_000  # positions of the trace that a fit reads
LENGTHS = (1, 2, 3, 4)  # of the drafts whose rounds it reads
RUN = 4  # the feature, see `specsim.policy.estimates.token_probability.features`


class Survival(NamedTuple):
    """A calibrated drafter.

    token : acceptance of a drafted token, given that all before it are accepted, from its features
    following : acceptance of the next token, not yet drafted, from the log odds of this token and its depth
    curve : [D], chance that the first 1..D tokens of any draft are accepted
    """

    token: Calibration
    following: Calibration
    curve: Floats

    def of(self, trace: Trace) -> FloatArray:
        """Chance [N, D] that the first 1..D tokens of a draft from each position are all accepted."""
        chances = np.empty(trace.confidence.shape, dtype=np.float32)
        for first in range(0, len(chances), ROWS):
            part = slice(first, first + ROWS)
            columns = (trace.confidence[part], trace.entropy_nats[part], trace.prob[part])
            seen = feature_table(*columns, np.zeros(len(columns[0])))
            chances[part] = np.cumprod(self.token.prob(seen), axis=1)
        return chances

    def ahead(self, survival: FloatArray) -> Floats:
        """Chance [R] that the drafted tokens and another are accepted. survival : [R, i], of those drafted"""
        before = survival[:, -2] if survival.shape[1] > 1 else np.ones(len(survival))
        last = np.divide(survival[:, -1], before, out=np.zeros(len(survival)), where=before > 0)
        return survival[:, -1] * self.following.prob(_next_features(last, survival.shape[1]))


def fit_survival(train: Trace, signal: Signal = "all") -> Survival:
    """Calibrate on the rounds of short fixed drafts of a trace, or of its first sequences if it is long.

    Not on every position: most rounds begin behind a rejected token, where drafts are accepted less often.

    Raises InputError if the trace has no drafter confidence.
    """
    if not train.informed:
        raise InputError("the trace has no drafter confidence; record it with a drafter that reports probabilities")
    enough = int(np.searchsorted(train.offsets, ENOUGH_TOKENS))
    part = train if enough >= train.sequences else train.select(range(enough))
    tokens = _tokens(part)
    token = calibrate(tokens.features[tokens.verified], tokens.accepted[tokens.verified], signal=signal)
    known = tokens.verified[:, 1:]
    depth = np.broadcast_to(np.arange(1, known.shape[1] + 1), known.shape)[known]
    last = token.prob(tokens.features[:, :-1][known])
    following = calibrate_features(_next_features(last, depth), tokens.accepted[:, 1:][known])
    verified = tokens.verified.sum(axis=0)
    rate = np.divide(tokens.accepted.sum(axis=0), verified, out=np.zeros(len(verified)), where=verified > 0)
    return Survival(token, following, np.cumprod(rate))


def _tokens(train: Trace) -> Tokens:
    """Drafted tokens of the rounds of fixed drafts; how long ago a draft was rejected, a rule does not look at."""
    table = cost_table(train, ConstantCost(1.0, 1.0))  # decisions do not see these costs
    lengths = [k for k in LENGTHS if k <= train.depth]
    logs = [replay(train, FixedK(k=k), table, log=True).rounds for k in lengths]
    parts = [drafted_tokens(train, log) for log in logs]
    joined = Tokens(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Tokens)))
    joined.features[..., RUN] = 0.0
    return joined


def _next_features(prob: Floats, depth: int | Floats) -> Floats:
    """Features [n, 2] of the token after one with this calibrated probability, the depth-th of its draft."""
    clipped = np.clip(prob, 1e-6, 1 - 1e-6)
    return np.stack([np.log(clipped / (1 - clipped)), np.broadcast_to(np.log(depth), clipped.shape)], axis=-1)
