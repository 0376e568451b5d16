"""Beta-TS on trees: rounds by a plain bandit, in distribution, and a tree of width 1 as a chain."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from specsim.io.errors import InputError
from specsim.io.rng import uniform
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.tree.beta_ts_tree import BetaTSTree
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.specsim.policy.test_tree_policies import (
    LENGTHS,
    Node,
    Scripted,
    children,
    grow,
    likeliest,
    record,
    recorded_text,
)
from tests.specsim.replaying.test_tree_replay import COST
from tests.support.tree_traces import tree_trace

OPTIONS = list(product(("exact", "printed"), ("per_token", "per_round")))
every_option = pytest.mark.parametrize(("counting", "theta"), OPTIONS)
PRIORS: list[dict[str, Any]] = [{"alpha0": 2.0, "beta0": 1.0}, {"alpha0": 0.4, "beta0": 0.2}]


class Bandit:
    """The levels' Beta posterior in plain Python. rng : draws theta, or None for draws that belong to a place."""

    def __init__(self, policy: BetaTSTree, rng: np.random.Generator | None = None, error: float = 0.0) -> None:
        self.policy, self.rng, self.error = policy, rng, error
        self.begin()

    def begin(self) -> None:
        self.alpha, self.beta = self.policy.alpha0, self.policy.beta0

    def another(self, drafted_levels: int, u: float) -> bool:
        """chi, after so many levels of this round."""
        fresh = drafted_levels == 1 or self.policy.theta == "per_token"
        if self.rng is not None:
            if fresh:
                self.drawn = self.rng.beta(self.alpha, self.beta)
            return bool(self.rng.random() < self.drawn)
        urn = 0 if self.policy.theta == "per_token" else drafted_levels - 1
        return u < (self.alpha + urn) / (self.alpha + self.beta + urn)

    def observe(self, levels: int, accepted: int) -> None:
        emitted = accepted + 1  # |Q_v|
        judged = min(emitted + (self.policy.counting == "printed"), levels) + self.error * (accepted < levels)
        self.alpha += accepted
        self.beta += judged - accepted


def decode(bandit: Bandit, seed: int = 0) -> list[tuple[int, ...]]:
    """Rows (sequence, t, drafted, accepted, verified, levels drafted) of every round, over the whole record."""
    policy = bandit.policy
    trace, places = recorded_text(None)
    rows = []
    for s, length in enumerate(LENGTHS):
        if not policy.carry:
            bandit.begin()
        t = 0
        while t < length:
            here, _ = places[s, t]
            limit = min(policy.max_depth, int(trace.budget_tokens[s]) - t - 1)
            level, drafted, levels = [()], list[Node](), 0
            while levels < limit:
                u = float(uniform(seed, int(trace.sequence_id[s]), t, levels))
                if levels and not bandit.another(levels, u):
                    break
                level = [child for node in sorted(likeliest(here, level, policy.beam))
                         for child in children(node, policy.width)]  # fmt: skip
                drafted += level
                levels += 1
            kept = set(likeliest(here, drafted, policy.nodes))
            accepted: Node = ()
            for rank in trace.true_rank[int(trace.offsets[s]) + t]:
                if (*accepted, int(rank)) not in kept:
                    break
                accepted = (*accepted, int(rank))
            if levels:
                bandit.observe(max(len(node) for node in kept), len(accepted))
            rows.append((s, t, len(drafted), len(accepted), len(kept), levels))
            t += len(accepted) + 1
    return rows


@every_option
@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 255), (2, 3, 255), (3, 3, 5), (2, 2, 2)], ids=str)
def test_replay_is_the_bandit_round_for_round(
    counting: str, theta: str, carry: bool, shape: tuple[int, int, int]
) -> None:
    beam, width, nodes = shape
    trace, _ = recorded_text(None)
    caught = 0
    for seed, prior in product(range(4), PRIORS):
        policy = BetaTSTree(
            counting=counting, theta=theta, carry=carry, beam=beam, width=width, nodes=nodes, max_depth=3, **prior
        )
        result = replay(trace, policy, cost_table(trace, COST), seed=seed, log=True)
        assert not result.truncated.any()
        rounds = [row[:5] for row in result.rounds.rows()]
        wanted = decode(Bandit(policy), seed)
        assert rounds == [row[:5] for row in wanted]
        # The policy is asked before every level but where the limit is reached, and its first answer is yes.
        limits = [min(3, int(trace.budget_tokens[s]) - t - 1) for s, t, *_ in wanted]
        asked = sum(min(row[5] + 1, limit) for row, limit in zip(wanted, limits, strict=True))
        assert result.policy_steps.sum() == asked
        wrong = [Bandit(policy, error=1.0), Bandit(replace(policy, carry=not carry))]
        caught += sum(rounds != [row[:5] for row in decode(bandit, seed)] for bandit in wrong)
    assert caught >= 8  # of 16: counts are seen to matter, within sequences and across them


def test_a_round_is_counted_by_the_depth_of_what_was_verified() -> None:
    """Levels that were drafted and then dropped were not judged: of six nodes the two likeliest are a single level."""
    trace, _ = recorded_text(None)
    policy = BetaTSTree(alpha0=1e9, beta0=1e-6, beam=1, width=3, nodes=2, max_depth=2)
    log = replay(trace, policy, cost_table(trace, COST), log=True).rounds
    assert {6} < set(log.drafted.tolist()) <= {0, 3, 6}
    rows = decode(Bandit(policy))
    assert [row[:5] for row in rows] == [row[:5] for row in log.rows()]


@every_option
def test_replay_has_the_distribution_of_theta_really_drawn(counting: str, theta: str) -> None:
    """Mean drafted and accepted tokens of 20,000 replays against 600 runs that draw theta; 4 standard errors."""
    trace, _ = recorded_text(None)
    policy = BetaTSTree(
        alpha0=3.0, beta0=0.5, counting=counting, theta=theta, carry=False, beam=2, width=3, max_depth=3
    )
    first = trace.select(np.zeros(20_000, dtype=np.int64))
    first = replace(first, sequence_id=np.arange(20_000))
    result = replay(first, policy, cost_table(first, COST))

    def differs(error: float) -> bool:
        bandit = Bandit(policy, np.random.default_rng(3), error)
        runs = []
        for _ in range(600):
            rows = np.array([row for row in decode(bandit) if row[0] == 0])
            runs.append(rows[:, 2:4].sum(axis=0))
        gaps = []
        for sampled, drawn in zip((result.drafted, result.accepted), np.array(runs).T, strict=True):
            spread = math.sqrt(sampled.var() / len(sampled) + drawn.var() / len(drawn))
            gaps.append(abs(sampled.mean() - drawn.mean()) / spread)
        return max(gaps) > 4

    assert not differs(0.0)
    assert differs(1.0)


@every_option
@pytest.mark.parametrize("carry", [False, True])
def test_a_tree_of_width_one_is_the_chain(counting: str, theta: str, carry: bool) -> None:
    """Draw for draw: every level has the uniform of the token that a chain drafts there."""
    trace: Trace = tree_trace(9, sequences=6, tokens=60, depth=5, width=4, nodes=20)
    prior = {"alpha0": 3.0, "beta0": 1.0, "counting": counting, "theta": theta, "carry": carry}
    chain, tree = BetaTS(**prior, max_draft_tokens=5), BetaTSTree(**prior, beam=1, width=1, max_depth=5)
    of_chain, of_tree = (replay(trace, p, cost_table(trace, COST, p), seed=4, log=True) for p in (chain, tree))
    assert of_chain.rounds.rows() == of_tree.rounds.rows()
    assert len(set(of_chain.rounds.drafted.tolist())) > 3


def test_siblings_need_no_record_where_all_are_verified() -> None:
    """A beam of 1 goes along the chain, which every record has; what hangs beside it goes by rank."""
    trace = tree_trace(9, sequences=6, tokens=60, depth=4, width=4, nodes=4)
    for policy in (BetaTSTree(beam=1, width=4, max_depth=4), BetaTSTree(beam=2, width=4, max_depth=4)):
        result = replay(trace, policy, cost_table(trace, COST))
        assert (result.truncated.sum() == 0) == (policy.beam == 1)
    whole = tree_trace(9, sequences=6, tokens=60, depth=4, width=4, nodes=400)
    policy = BetaTSTree(beam=1, width=4, max_depth=4)
    few, all_ = (replay(t, policy, cost_table(t, COST), log=True).rounds for t in (trace, whole))
    assert few.rows() == all_.rows()


def test_a_beam_that_the_record_may_have_wrong_is_told() -> None:
    """Second level: .1 .1 and .24 .16, of which the record has the chain's .1 and .24; the beam is .24 and .16."""
    drafter = Scripted({(): [0.5, 0.4], (0,): [0.2, 0.2], (1,): [0.6, 0.4], (1, 0): [0.5, 0.5]})
    recorded, horizon = record(drafter, nodes=5, width=2, depth=3)
    assert recorded == {(), (0,), (0, 0), (0, 0, 0), (1,), (1, 0)} and horizon == pytest.approx(0.16)
    policy = BetaTSTree(alpha0=2.0, beam=2, width=2, max_depth=3)
    replayed, real = grow(policy, drafter, recorded=recorded), grow(policy, drafter)
    assert replayed.expanded[2] == [(0, 0), (1, 0)] and real.expanded[2] == [(1, 0), (1, 1)]
    assert replayed.floor == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"beam": 2, "width": 3, "max_depth": 4}, (3 + 3 * 6, 2, 21)),
        ({"beam": 8, "width": 2, "max_depth": 5}, (2 + 4 + 8 + 16 + 16, 8, 46)),
        ({"beam": 8, "width": 2, "max_depth": 5, "nodes": 20}, (46, 8, 20)),
        ({"beam": 5, "width": 1, "max_depth": 7}, (7, 1, 7)),
    ],
    ids=str,
)
def test_bounds_are_those_of_the_deepest_tree(settings: dict[str, int], sizes: tuple[int, int, int]) -> None:
    policy = BetaTSTree(**settings)
    assert (policy.max_drafted, policy.max_expanded, policy.max_verified_nodes) == sizes


def test_a_tree_without_room_is_refused() -> None:
    with pytest.raises(InputError, match="beam=9 and width=8 draft 1080 nodes, more than 1023; lower either"):
        BetaTSTree(max_depth=16, beam=9, width=8)
