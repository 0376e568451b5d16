"""The tree oracle against every sequence of rounds there is, against the chain oracle, and against tree policies."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost
from specsim.cost.table import CostTable
from specsim.io.errors import InputError
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.cape import Cape
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.pct import PCT
from specsim.policy.tree.vct import VCT
from specsim.replaying.oracles import chain_oracle_seconds, reachable_depth, tree_oracle_seconds
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.specsim.replaying.test_oracle import DyadicCost
from tests.support.reference import RampCost, small_trace
from tests.support.tree_traces import tree_trace


class DyadicTreeCost(DyadicCost):
    """Of trees, where more may cost less."""

    max_tree_tokens = 40

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng, tokens=50)
        self.wide_s, self.catch_s = rng.integers(0, 9, 50) / 64, int(rng.integers(0, 30)) / 64

    def catch_up(self, context: Any) -> Any:
        return self.catch_s + np.asarray(context) // 16 / 64

    def verify(self, n_tokens: int, context: Any) -> Any:
        return 1000.0 + np.zeros(np.shape(context))  # of chains: not to be looked at

    def wider(self, n_nodes: int, context: Any) -> Any:
        return (self.wide_s[n_nodes] if n_nodes > 1 else 0.0) + np.zeros(np.shape(context))

    def tree_verify(self, n_tokens: int, context: Any) -> Any:
        return super().verify(n_tokens, context)

    def tree_round_overhead(self) -> float:
        return 3 / 64


def brute_force_seconds(trace: Trace, table: CostTable, width: int) -> float:
    """The first sequence's, over every number of levels and of true nodes verified in every round.

    Of each pass the cheapest width, and of the verification the cheapest number of tokens that holds the true nodes.
    """
    tree, ranks = table.tree, trace.true_rank
    length, budget, prompt = int(trace.output_tokens[0]), int(trace.budget_tokens[0]), int(trace.prompt_tokens[0])

    @cache
    def least(t: int, behind: bool) -> float:
        if t == length:
            return 0.0
        at = prompt + t - 1 >> table.bucket_bits
        choices = [tree.verify_s[1:, at].min() + least(t + 1, True)]
        drafting = float(table.catch_up_s[at]) if behind else 0.0
        for levels in range(1, min(trace.depth, budget - t - 1) + 1):
            drafting += table.draft_s[levels, at] - table.draft_s[levels - 1, at] + tree.wider_s[1:, at].min()
            for verified in range(levels + 1):
                if verified and not 0 <= ranks[t, verified - 1] < width:
                    break
                then = least(min(t + verified + 1, length), verified == levels)
                choices.append(drafting + tree.verify_s[verified + 1 :, at].min() + then)
        return tree.round_overhead_s + min(map(float, choices))

    return least(0, False)


@pytest.mark.parametrize("seed", range(25))
def test_no_sequence_of_rounds_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace = tree_trace(seed, sequences=1, tokens=int(rng.integers(1, 12)), depth=4, width=3, nodes=8, vocabulary=5)
    trace = dataclasses.replace(
        trace, prompt_tokens=rng.integers(1, 40, 1), budget_tokens=trace.budget_tokens + rng.integers(0, 4)
    )
    table = cost_table(trace, DyadicTreeCost(rng))
    for width in (1, 2, 3):
        assert tree_oracle_seconds(trace, table, width).tolist() == [brute_force_seconds(trace, table, width)]
    assert tree_oracle_seconds(trace, table).tolist() == tree_oracle_seconds(trace, table, 3).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_of_width_one_it_is_the_chain_oracle(seed: int) -> None:
    """Where nothing is to be caught up on: else a tree may be drafted a level deeper than it is verified."""
    trace = tree_trace(seed, tokens=50)

    class NoLag(RampCost):
        max_tree_tokens = 30

        def catch_up(self, context: Any) -> Any:
            return np.zeros(np.shape(context))

    table = cost_table(trace, NoLag())
    chain = chain_oracle_seconds(trace, table)
    np.testing.assert_allclose(tree_oracle_seconds(trace, table, 1), chain, rtol=1e-12)
    assert (tree_oracle_seconds(trace, table, 4) < chain).all()


WIDTHS = st.integers(1, 4)
POLICIES = st.one_of(
    st.builds(VCT, width=st.integers(1, 3), depth=st.integers(1, 3), level_nodes=st.integers(1, 9)),
    st.builds(Cape, width_30=WIDTHS, width_60=WIDTHS, width_80=WIDTHS, width_100=WIDTHS, depth=st.integers(1, 5)),
    st.builds(Eagle2, nodes=st.integers(1, 30), depth=st.integers(1, 5), top_k=WIDTHS),
    st.builds(PCT, cost_ratio=st.floats(0.05, 1), width=WIDTHS, max_depth=st.integers(1, 5), max_nodes=st.just(30)),
)


@settings(max_examples=120, deadline=None)
@given(policy=POLICIES, seed=st.integers(0, 30), cost=st.integers(0, 30))
def test_no_policy_is_faster(policy: TreePolicy, seed: int, cost: int) -> None:
    trace = tree_trace(seed)
    table = cost_table(trace, DyadicTreeCost(np.random.default_rng(cost)))
    assert (tree_oracle_seconds(trace, table) <= replay(trace, policy, table).speculative_s + 1e-9).all()


def test_it_drafts_just_what_is_accepted() -> None:
    """Ranks 1 0 2 and then none below the width: a round of 3 levels and 3 nodes, then a token at a time."""
    trace = tree_trace(0, sequences=1, tokens=6, depth=3, width=3)
    ranks = np.full((6, 3), 7, dtype=np.int16)
    ranks[0] = 1, 0, 2
    trace = dataclasses.replace(trace, true_rank=ranks)
    assert reachable_depth(trace).tolist() == [3, 0, 0, 0, 0, 0]
    assert reachable_depth(trace, 2).tolist() == [2, 0, 0, 0, 0, 0]
    table = cost_table(trace, ConstantCost(1.0, 8.0))
    assert tree_oracle_seconds(trace, table).tolist() == [3 + 3 * 8.0]
    assert tree_oracle_seconds(trace, table, 2).tolist() == [2 + 4 * 8.0]
    assert tree_oracle_seconds(trace, table, 1).tolist() == [6 * 8.0]
    # Without recorded trees any rank will do: after the first round another of a single level.
    assert tree_oracle_seconds(dataclasses.replace(trace, tree=None), table).tolist() == [3 + 1 + 2 * 8.0]


def test_what_is_missing_is_named() -> None:
    trace = tree_trace(0)
    table = cost_table(trace, ConstantCost(1e-3, 1e-2))
    with pytest.raises(InputError, match="true_rank"):
        tree_oracle_seconds(small_trace(), cost_table(small_trace(), RampCost()))
    with pytest.raises(InputError, match="costs of trees"):
        tree_oracle_seconds(trace, dataclasses.replace(table, tree=None))
    with pytest.raises(InputError, match="compile them for this trace"):
        tree_oracle_seconds(trace, cost_table(trace.select([0]), ConstantCost(1e-3, 1e-2)))
    with pytest.raises(InputError, match="rejection"):
        tree_oracle_seconds(dataclasses.replace(trace, meta={**trace.meta, "decoding": {"mode": "rejection"}}), table)
