"""Cali-TS on trees: as a chain at width 1, and which score decides about a level; Cali-TS by confidence."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, logit

from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost
from specsim.io.rng import uniform
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.cali_ts_confidence import CaliTSConfidence
from specsim.policy.tree.cali_ts_tree import CaliTSTree
from specsim.replaying.expected import expected_replay
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from specsim.trace.tree_record import record_from_nodes
from tests.specsim.policy.test_tree_policies import DEPTH, LENGTHS, Node, children, likeliest, recorded_text
from tests.specsim.replaying.test_tree_replay import COST
from tests.support.reference import build_trace
from tests.support.tree_traces import tree_trace

every_option = pytest.mark.parametrize(
    ("counting", "theta", "carry"), [*product(("exact", "printed"), ("per_token", "per_round"), (False, True))]
)


def scored(trace: Trace, seed: int = 0) -> Trace:
    """The trace with random scores at every position and depth."""
    return replace(trace, score=np.random.default_rng(seed).random(trace.true_rank.shape, np.float32))


@every_option
def test_a_tree_of_width_one_is_the_chain(counting: str, theta: str, carry: bool) -> None:
    """Draw for draw: every level has the uniform and the score of the token that a chain drafts there."""
    trace = scored(tree_trace(9, sequences=6, tokens=60, depth=5, width=4, nodes=20))
    settings: dict[str, Any] = {"theta0": 0.7, "sigma_m": 0.3, "sigma_s": 0.5}
    settings |= {"counting": counting, "theta": theta, "carry": carry}
    chain, tree = CaliTS(**settings, max_draft_tokens=5), CaliTSTree(**settings, beam=1, width=1, max_depth=5)
    of_chain, of_tree = (replay(trace, p, cost_table(trace, COST, p), seed=4, log=True) for p in (chain, tree))
    assert of_chain.rounds.rows() == of_tree.rounds.rows()
    assert len(set(of_chain.rounds.drafted.tolist())) > 3


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (3, 2)], ids=str)
def test_the_score_along_the_first_candidates_decides(shape: tuple[int, int]) -> None:
    """With a predictor that never errs theta is its score: of the newest pass over the first candidates' chain."""
    beam, width = shape
    trace, places = recorded_text(None)
    trace = scored(trace)
    policy = CaliTSTree(sigma_m=1e-6, sigma_s=1e4, beam=beam, width=width, nodes=255, max_depth=DEPTH)
    log = replay(trace, policy, cost_table(trace, COST), seed=3, log=True).rounds
    rows = []
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
                expanded = sorted(likeliest(here, level, beam))
                if (0,) * levels in expanded:
                    score = float(trace.score[row, levels])
                level = [child for node in expanded for child in children(node, width)]
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


@pytest.mark.parametrize(("after_first", "levels"), [((0.3, 0.25), 4), ((0.6, 0.3), 3)], ids=["left", "kept"])
def test_where_the_beam_has_left_that_chain_its_last_score_stays(after_first: tuple[float, float], levels: int) -> None:
    """Of a root with children .51 and .49, those of the second are (.5, .45): likelier than the first's, or not."""
    nodes = [node for depth in range(5) for node in product((0, 1), repeat=depth)]
    children_of = {(): (0.51, 0.49), (0,): after_first, (1,): (0.5, 0.45)}
    prob = [children_of.get(node[:-1], (0.6, 0.3))[node[-1]] for node in nodes[1:]]
    parent = [nodes.index(node[:-1]) for node in nodes[1:]]
    tokens, depth = 9, 4
    rows = (np.array([values] * tokens) for values in (parent, [0] * len(parent), prob))
    rank = np.where(np.arange(tokens)[:, None] + np.arange(depth) < tokens, 0, -1).astype(np.int16)
    trace = build_trace(np.random.default_rng(0), rank == 0, [tokens], true_rank=rank)
    scores = np.tile(np.array([1.0, 1.0, 0.0, 0.0], np.float32), (tokens, 1))  # the third pass says to stop
    trace = replace(trace, tree=record_from_nodes(*rows, np.full(tokens, -1.0), 2), score=scores)
    policy = CaliTSTree(sigma_m=1e-6, sigma_s=1e4, beam=2, width=2, nodes=255, max_depth=4)
    log = replay(trace, policy, cost_table(trace, COST), log=True).rounds
    assert log.drafted[0] == 2 + 4 * (levels - 1)


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
    scored = replace(trace, score=scores)
    settings: dict[str, Any] = {"theta0": 0.7, "sigma_m": 0.3, "sigma_s": 0.5, "max_draft_tokens": 5}
    settings |= {"counting": counting, "theta": theta, "carry": carry}
    trained, free = CaliTS(**settings), CaliTSConfidence(slope=slope, offset=offset, **settings)
    predicted, calibrated = (
        replay(t, p, cost_table(t, COST, p), seed=4, log=True).rounds for t, p in ((scored, trained), (trace, free))
    )
    assert predicted.rows() == calibrated.rows()
    assert len(set(predicted.drafted.tolist())) > 2
    if theta == "per_token" and not carry:
        table = cost_table(trace, ConstantCost(1.0, 10.0), free)
        averages = (expected_replay(t, p, table) for t, p in ((scored, trained), (trace, free)))
        first, second = (average.drafted.sum() for average in averages)
        assert first == pytest.approx(second, rel=1e-5)
