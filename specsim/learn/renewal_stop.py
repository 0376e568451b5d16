"""Fit of RenewalStop: calibrate acceptance on the policy's own rounds, solve for thresholds, repeat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.policy.base import build_policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.renewal_stop import RenewalStop

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.trace.trace import Trace

BINS = 12  # of the signal
FIRST_DRAFT = 4  # tokens; fixed draft length of the first rounds
VALUE_STEPS = 4  # updates of the value of a token in each pass
PASSES = 6  # over the rounds of the previous policy


def _learn(policy: RenewalStop, train: Trace, table: CostTable) -> RenewalStop:
    """Repeat replay, calibration on its rounds and solution for thresholds; return the fastest policy on the trace.

    The value of a token is the time per token of the last replay, which converges to its fixed point.
    """
    from specsim.learn.chain_calibration import calibrate, drafted_tokens
    from specsim.learn.chain_stopping import fit_chain, mean_cost, thresholds
    from specsim.replaying.checks import check_replayable
    from specsim.replaying.replay import replay

    check_replayable(train, policy)
    cost = mean_cost(train, table)
    last = replay(train, FixedK(k=min(FIRST_DRAFT, policy.max_draft_tokens)), table, log=True)
    best, least_s = policy, math.inf
    for _ in range(PASSES):
        tokens = drafted_tokens(train, last.rounds)
        options: dict[str, Any] = {"signal": policy.signal, "method": policy.calibration}
        model = calibrate(tokens.features[tokens.verified], tokens.accepted[tokens.verified], **options)
        scores = model.score(tokens.features[tokens.verified])
        edges = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
        features, accepted = tokens.followed()
        next_model = calibrate(features, accepted, **options) if len(accepted) and not policy.lookahead else None
        chain = fit_chain(tokens, model, edges, next_model)
        for _ in range(VALUE_STEPS):
            time_per_token_s = float(last.speculative_s.sum() / last.output_tokens.sum())
            limits = thresholds(
                chain, cost, policy.value_scale * time_per_token_s, policy.max_draft_tokens, lookahead=policy.lookahead
            )
            candidate = dataclasses.replace(
                policy,
                time_per_token_s=time_per_token_s,
                weights=tuple(model.weights.tolist()),
                knots=tuple(model.knots.tolist()),
                probs=tuple(model.probs.tolist()),
                edges=tuple(edges.tolist()),
                thresholds=tuple(limits.ravel().tolist()),
            )
            last = replay(train, candidate, table, log=True)
        if last.speculative_s.sum() < least_s:
            best, least_s = candidate, float(last.speculative_s.sum())
    return best


def fit_renewal_stop(
    kind: type[RenewalStop], settings: Mapping[str, Any], train: Trace, table: CostTable
) -> RenewalStop:
    if "thresholds" in settings:
        return build_policy(kind, settings)
    return build_policy(kind, _learn(build_policy(kind, settings), train, table).settings)
