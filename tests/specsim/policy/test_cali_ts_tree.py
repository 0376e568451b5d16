"""Cali-TS on trees: as a chain where it is one, which score decides about a level, and a predictor that costs nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.cali_ts_confidence import CaliTSConfidence
from specsim.policy.tree.cali_ts_tree import CaliTSTree
from specsim.replaying.expected import expected_replay
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.rng import uniform
from specsim.trace.trace import Trace
from tests.specsim.policy.test_tree_policies import DEPTH, LENGTHS, Node, children, likeliest, recorded_text
from tests.specsim.replaying.test_tree_replay import COST
from tests.support.tree_traces import tree_trace

every_option = pytest.mark.parametrize(
    ("counting", "theta", "carry"), [*product(("exact", "printed"), ("per_token", "per_round"), (False, True))]
)


def scored(trace: Trace, seed: int = 0) -> Trace:
    """The trace with random scores at every position and depth."""
    assert trace.true_rank is not None
    return replace(trace, score=np.random.default_rng(seed).random(trace.true_rank.shape, np.float32))


@every_option
def test_a_tree_of_width_one_is_the_chain(counting: str, theta: str, carry: bool) -> None:
    """Draw for draw: every level has the uniform and the score of the token that a chain drafts there."""
    trace = scored(tree_trace(9, sequences=6, tokens=60, depth=5, width=4, nodes=20))
    settings: dict[str, Any] = {"theta0": 0.7, "sigma_m": 0.3, "sigma_s": 0.5}
    settings |= {"counting": counting, "theta": theta, "carry": carry}
    chain, tree = CaliTS(**settings, max_draft_tokens=5), CaliTSTree(**settings, beam=1, width=1, max_depth=5)
    one, other = (replay(trace, p, cost_table(trace, COST, p), seed=4, log=True) for p in (chain, tree))
    assert one.rounds is not None and other.rounds is not None
    assert one.rounds.rows() == other.rounds.rows()
    assert len(set(one.rounds.drafted.tolist())) > 3


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 2)], ids=str)
def test_the_score_along_the_first_candidates_decides(shape: tuple[int, int]) -> None:
    """With a predictor that never errs theta is its score: of the newest pass over the first candidates' chain."""
    beam, width = shape
    trace, places = recorded_text(None)
    trace = scored(trace)
    assert trace.score is not None and trace.true_rank is not None
    policy = CaliTSTree(sigma_m=1e-6, sigma_s=1e4, beam=beam, width=width, nodes=255, max_depth=DEPTH)
    log = replay(trace, policy, cost_table(trace, COST), seed=3, log=True).rounds
    assert log is not None
    rows, chain_left = [], 0
    for s, length in enumerate(LENGTHS):
        t = 0
        while t < length:
            here, _ = places[s, t]
            row = int(trace.offsets[s]) + t
            limit = min(DEPTH, int(trace.budget_tokens[s]) - t - 1)
            level, drafted, levels, score = [()], list[Node](), 0, 0.0
            while levels < limit:
                u = float(uniform(3, int(trace.sequence_id[s]), t, levels))
                if levels and u >= score:
                    break
                expanded = sorted(likeliest(here, level, beam))  # type: ignore[arg-type]
                if (0,) * levels in expanded:
                    score = float(trace.score[row, levels])
                else:
                    chain_left += 1
                level = [child for node in expanded for child in children(node, width)]  # type: ignore[misc]
                drafted += level
                levels += 1
            accepted: Node = ()
            for rank in trace.true_rank[row]:
                if (*accepted, int(rank)) not in drafted:
                    break
                accepted = (*accepted, int(rank))
            rows.append((s, t, len(drafted), len(accepted), len(drafted)))
            t += len(accepted) + 1
    assert [row[:5] for row in log.rows()] == rows
    assert (chain_left > 0) == (beam > 1)  # a beam of one never leaves the chain


def test_scores_are_paid_for_with_every_draft_step() -> None:
    contexts = np.array([1, 400])
    cost = ProfileCost(contexts, np.ones((5, 2)), np.zeros(2), np.full((6, 2), 12.0), np.full(2, 10.0), 0.0, 0.5, 0.25)
    assert float(CaliTSTree().cost(cost).draft(1, 10)) == float(CaliTS().cost(cost).draft(1, 10)) == 1.25
    assert float(CaliTSConfidence().cost(cost).draft(1, 10)) == 1.0


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.6, -0.8), (2.5, 1.0)])
@every_option
def test_calibrated_confidence_stands_in_the_predictors_place(
    slope: float, offset: float, counting: str, theta: str, carry: bool
) -> None:
    """Rounds are those of Cali-TS whose predictor had said sigmoid(slope logit(confidence) + offset)."""
    trace = tree_trace(9, sequences=6, tokens=60, depth=5, width=4, nodes=20)
    with np.errstate(divide="ignore"):
        scores = expit(slope * logit(trace.confidence.astype(np.float64)) + offset).astype(np.float32)
    told = replace(trace, score=scores)
    settings: dict[str, Any] = {"theta0": 0.7, "sigma_m": 0.3, "sigma_s": 0.5, "max_draft_tokens": 5}
    settings |= {"counting": counting, "theta": theta, "carry": carry}
    trained, free = CaliTS(**settings), CaliTSConfidence(slope=slope, offset=offset, **settings)
    one, other = (
        replay(t, p, cost_table(t, COST, p), seed=4, log=True).rounds for t, p in ((told, trained), (trace, free))
    )
    assert one is not None and other is not None and one.rows() == other.rows()
    assert len(set(one.drafted.tolist())) > 2
    if theta == "per_token" and not carry:
        table = cost_table(trace, ConstantCost(1.0, 10.0), free)
        averages = (expected_replay(t, p, table) for t, p in ((told, trained), (trace, free)))
        first, second = (average.drafted.sum() for average in averages)
        assert first == pytest.approx(second, rel=1e-5)
