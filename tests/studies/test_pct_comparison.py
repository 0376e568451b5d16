"""PCT beside EAGLE-2 as its paper compares them: counts of rounds, and what the prompts decide."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.static_tree import shape as tree_shapes
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from studies.policies.paper import PaperComparison, Rounds, paper_pct
from tests.support.tree_traces import tree_trace

CONFIG = {"paper": {"s_d": 1.1e-3, "s_t": 29.8e-3, "width": 5, "max_depth": 6, "leaf_threshold": 0.01}}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return tree_trace(1, sequences=8, depth=6, width=10, nodes=256)


def test_rounds_count_nodes_and_tokens(trace: Trace) -> None:
    chain = Rounds.of(trace, FixedK(k=3))
    assert chain.truncated == 0 and 0 < chain.verified.estimate <= 3
    star = SparseTree(children=(4.0, 0.0, 0.0, 0.0, 0.0))
    rounds = Rounds.of(trace, star)
    # Each sequence's last round has no room for a draft where a round before left a single token.
    log = PricedTrace(trace, ConstantCost(1.0, 1.0)).replay(star, log=True).rounds
    accepted = tree_shapes.accepted_tokens((4, 0, 0, 0, 0), trace.true_rank)
    starts = trace.offsets[log.sequence] + log.t
    assert rounds.tau.estimate == pytest.approx(1 + np.where(log.drafted > 0, accepted[starts], 0).mean())
    assert rounds.verified.estimate == pytest.approx(log.verified.mean())


def test_both_are_replayed_on_all_sequences_and_read_again(trace: Trace) -> None:
    comparison = PaperComparison.of(trace, CONFIG)
    assert comparison.pct == Rounds.of(trace, paper_pct(CONFIG)) and comparison.eagle2 == Rounds.of(trace, Eagle2())
    assert comparison.node_share == comparison.pct.verified.estimate / comparison.eagle2.verified.estimate
    assert PaperComparison.from_document(json.loads(json.dumps(asdict(comparison)))) == comparison


def test_what_too_few_nodes_truncate_is_not_compared(trace: Trace) -> None:
    small = PaperComparison.of(tree_trace(1, sequences=8, depth=6, width=10, nodes=20), CONFIG)
    assert not small.comparable and small.text.endswith("too few nodes were recorded.")
    assert "% of EAGLE-2's nodes" in PaperComparison.of(trace, CONFIG).text


def test_a_share_is_decided_only_where_its_interval_lies_on_one_side(trace: Trace) -> None:
    comparison = PaperComparison.of(trace, CONFIG)
    low, same, high = (comparison.tau_beyond(comparison.tau_ratio + step).difference for step in (-0.2, 0.0, 0.2))
    assert low.low > 0 and same.low <= 0 <= same.high and high.high < 0
    equal = dataclasses.replace(comparison, pct=comparison.eagle2)
    assert equal.text == (
        "PCT with its paper's settings verifies 100 % of EAGLE-2's nodes (more than half) at 100.0 % of its acceptance "
        "length (comparable)."
    )
