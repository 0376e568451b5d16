"""Fit of HardwarePCT: calibrate nodes on the policy's own rounds, solve for its gains, repeat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.policy.base import build_policy
from specsim.policy.tree.hardware_pct import HardwarePCT

if TYPE_CHECKING:
    from specsim.cost.table import CostTable
    from specsim.learn.tree_stopping import RecordedTrees, TreeCost
    from specsim.trace.trace import Trace

PASSES = 4  # over the rounds of the previous policy
VALUE_STEPS = 3  # updates of the value of a token in each pass


def _limits(defaults: HardwarePCT, train: Trace, table: CostTable) -> dict[str, int]:
    """Default width, depth and nodes, limited to those of the trace and the costs."""
    width = train.tree.width if train.tree else defaults.width
    covered = len(table.tree.verify_s) - 2 if table.tree else defaults.max_nodes
    return {
        "width": min(defaults.width, width),
        "max_depth": min(defaults.max_depth, train.depth),
        "max_nodes": max(1, min(defaults.max_nodes, covered)),
    }


def _learn(policy: HardwarePCT, train: Trace, table: CostTable) -> HardwarePCT:
    """Repeat replay, calibration on its rounds and solution for the gains; return the fastest policy on the trace."""
    from sklearn.isotonic import IsotonicRegression  # slow to import, and a replay does not need it

    from specsim.learn.tree_calibration import calibrate_tree, rounds_of, verified_nodes, with_ceiling
    from specsim.learn.tree_stopping import RecordedTrees, mean_tree_cost
    from specsim.replaying.checks import check_replayable
    from specsim.replaying.replay import replay

    check_replayable(train, policy)
    method: Any = policy.calibration
    assert train.tree is not None
    oracle_width = max(1, min(policy.max_nodes, int(1 / policy.min_path_prob)))
    cost = mean_tree_cost(train, table, max_nodes=policy.max_nodes, max_expanded=oracle_width)
    marginal_s = IsotonicRegression().fit_transform(np.arange(policy.max_nodes), np.diff(cost.verify_s))
    candidate = dataclasses.replace(
        policy,
        time_per_token_s=float(cost.verify_s[0] / 2),
        verify_s=tuple(cost.verify_s.tolist()),
        extra_nodes_s=(0.0, *cost.extra_nodes_s[1:].tolist()),
        gains=tuple(float(cost.verify_s[0]) * gain for gain in policy.gains),
        min_gain_s=(0.0, *cost.pass_s[1 : policy.max_depth].tolist()) if policy.max_depth > 1 else (0.0,),
    )
    best, least_s = candidate, math.inf
    last = replay(train, candidate, table, log=True)
    for _ in range(PASSES):
        assert last.rounds is not None
        mean_accepted = float(last.accepted.sum() / last.num_rounds.sum())
        rounds = rounds_of(train, last.rounds, mean_accepted)
        model = with_ceiling(calibrate_tree(verified_nodes(train, rounds), method=method), train, rounds)
        recorded = RecordedTrees(rounds.rows, train.tree.first_child, model.values(train, rounds))
        candidate = dataclasses.replace(
            candidate,
            weights=tuple(model.weights.tolist()),
            accept_probs=tuple(model.probs.tolist()),
            scale=model.scale,
            power=model.power,
            mean_accepted=mean_accepted,
        )
        for _ in range(VALUE_STEPS):
            time_per_token_s = float(last.speculative_s.sum() / last.output_tokens.sum())
            margin_s = float(marginal_s[np.minimum(last.rounds.verified, policy.max_nodes - 1)].mean())
            candidate = _solve(candidate, recorded, cost, time_per_token_s, margin_s)
            last = replay(train, candidate, table, log=True)
            if last.speculative_s.sum() < least_s:
                best, least_s = candidate, float(last.speculative_s.sum())
    return best


def _solve(
    policy: HardwarePCT, recorded: RecordedTrees, cost: TreeCost, time_per_token_s: float, margin_s: float
) -> HardwarePCT:
    """Solve for the policy's gains at this value of a token."""
    from specsim.learn.tree_stopping import DraftLimits, children_gains, levels, min_gains

    limits = DraftLimits(policy.max_depth, policy.width, policy.min_path_prob)
    edges, gains = children_gains(recorded, limits, time_per_token_s, margin_s)
    predicted_gain_s, extra_s, best_value_s = levels(
        recorded, limits, time_per_token_s, cost.verify_s, cost.extra_nodes_s, edges, gains.ravel()
    )
    limit_s = min_gains(predicted_gain_s, extra_s, best_value_s, cost)[: policy.max_depth]
    return dataclasses.replace(
        policy,
        time_per_token_s=time_per_token_s,
        edges=tuple(edges.tolist()),
        gains=tuple(gains.ravel().tolist()),
        min_gain_s=tuple(limit_s.tolist()),
    )


def fit_hardware_pct(
    kind: type[HardwarePCT], settings: Mapping[str, Any], train: Trace, table: CostTable
) -> HardwarePCT:
    if "gains" in settings:
        return build_policy(kind, settings)
    policy = build_policy(kind, {**_limits(kind(), train, table), **settings})
    return build_policy(kind, _learn(policy, train, table).settings)
