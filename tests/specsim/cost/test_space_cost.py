"""What SPACE's rounds cost: masks ride in the verification pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specsim.learn.evaluate import evaluate_many
from specsim.learn.storage import cost_digest
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES, make_policy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, small_trace


def test_space_pays_for_its_passes_and_for_no_draft_step() -> None:
    """k = 2: the rounds of fixed K = 2, every pass over 1 + 2 x 4 = 9 tokens, but for shorter drafts at the end."""
    trace, model = small_trace(), RampCost(slope=0.0)
    policy = make_policy("space_k", {"k": 2})
    table = cost_table(trace, model, policy)
    result = replay(trace, policy, table, log=True)
    plain = replay(trace, FixedK(k=2), cost_table(trace, model), log=True)
    assert result.rounds.rows() == plain.rounds.rows()
    draft_s, policy_s, verify_s, other_s = result.seconds.sum(axis=0)
    rounds = result.num_rounds.sum()
    assert draft_s == policy_s == 0
    passes = [float(model.verify(3 * (drafted + 1), 0)) for drafted in result.rounds.drafted.tolist()]
    assert verify_s == pytest.approx(sum(passes), rel=1e-12)
    assert passes.count(float(model.verify(9, 0))) > 0.8 * rounds
    assert other_s == pytest.approx(rounds * model.round_overhead(), rel=1e-12)
    np.testing.assert_array_equal(result.autoregressive_s, plain.autoregressive_s)


class SizedTrees(RampCost):
    """Trees cost what chains of as many tokens cost, and a compaction."""

    max_tree_tokens = 512

    def tree_verify(self, n_tokens: int, context: Any) -> Any:
        return self.verify(n_tokens, context) + 7e-3


def as_space(trace: Trace) -> Trace:
    return replace(trace, meta={**trace.meta, "drafter_kind": "space"})


@pytest.mark.parametrize(("name", "settings", "k"), [
    ("space_k", {"k": 3}, 3), ("fixed_k", {"k": 2}, 2), ("adaedl", {"lambda0": 0.5, "max_draft_tokens": 4}, 4),
])  # fmt: skip
def test_on_a_trace_of_space_masks_are_part_of_every_pass(name: str, settings: dict[str, Any], k: int) -> None:
    """m drafted tokens cost a tree of (m + 1)(k + 1), with k of the run's longest draft, and measured draft steps."""
    trace, model = small_trace(), SizedTrees(slope=0.0)
    policy = make_policy(name, settings)
    result = replay(as_space(trace), policy, cost_table(as_space(trace), model, policy), log=True)
    elsewhere = replay(trace, policy, cost_table(trace, RampCost(slope=0.0), FixedK(k=2)), log=True)
    assert result.rounds.rows() == elsewhere.rounds.rows()
    drafted = result.rounds.drafted.tolist()
    draft_s, _, verify_s, _ = result.seconds.sum(axis=0)
    assert verify_s == pytest.approx(sum(float(model.tree_verify((m + 1) * (k + 1), 0)) for m in drafted), rel=1e-12)
    assert draft_s == pytest.approx(sum(float(model.draft(m, 0)) for m in drafted if m), rel=1e-12) and draft_s > 0
    np.testing.assert_array_equal(result.autoregressive_s, elsewhere.autoregressive_s)


def test_no_policy_beats_the_oracle_on_a_trace_of_space() -> None:
    """Of any k a pass over m drafted tokens has at least m masks in a group."""
    trace, model = as_space(small_trace()), SizedTrees(slope=0.0)
    least = chain_oracle_seconds(trace, cost_table(trace, model))
    for k in range(1, trace.depth + 1):
        policy = FixedK(k=k)
        seconds = replay(trace, policy, cost_table(trace, model, policy)).speculative_s
        assert (least <= seconds + 1e-12).all()
    priced = cost_table(trace, model).verify_s[:, 0]
    assert priced[2:].tolist() == [float(model.tree_verify(n * n, 0)) for n in range(2, len(priced))]
    assert priced[1] == float(model.verify(1, 0))  # a round that drafts nothing has no masks at the least


def test_tuning_on_a_trace_of_space_counts_every_policys_own_masks() -> None:
    trace, model = as_space(small_trace()), SizedTrees(slope=0.0)
    points = [{"k": k} for k in (1, 2, 4)]
    evaluated = evaluate_many(FixedK, points, PricedTrace(trace, model), jobs=1)
    for point, seconds in zip(points, evaluated.seconds, strict=True):
        policy = FixedK(**point)
        alone = replay(trace, policy, cost_table(trace, model, policy)).speculative_s.sum()
        assert seconds == pytest.approx(alone, rel=1e-12)


def test_a_search_on_a_trace_of_space_goes_on_only_under_the_same_costs_of_its_passes() -> None:
    class Dearer(SizedTrees):
        def tree_verify(self, n_tokens: int, context: Any) -> Any:
            return super().tree_verify(n_tokens, context) + (n_tokens == 6) * 1e-3  # no square, so of no oracle's pass

    trace, costs = small_trace(), (SizedTrees(slope=0.0), Dearer(slope=0.0))
    assert len({cost_digest(PricedTrace(as_space(trace), cost)) for cost in costs}) == 2
    assert len({cost_digest(PricedTrace(trace, cost)) for cost in costs}) == 1


def test_what_belongs_on_a_trace_of_space() -> None:
    """Chains, space_k among them, which elsewhere is out of place; and no trees."""
    trace = small_trace()
    assert "space" in str(unsupported_reason(trace, POLICIES["space_k"]))
    assert unsupported_reason(as_space(trace), POLICIES["space_k"]) is None
    assert "chains only" in str(unsupported_reason(as_space(trace), POLICIES["vct"]))
