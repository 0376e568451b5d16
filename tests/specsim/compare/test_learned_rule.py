"""The rule learned from the signals: as fast as the best that a search by hand finds, and blind to what none tells."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.compare.leaderboard import leaderboards, learned_rule
from specsim.cost.model import ConstantCost
from specsim.learn.settings import SearchSettings
from specsim.policy.registry import POLICIES, make_policy
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from tests.support.reference import build_trace

S_D, S_T = 0.1, 1.0
COST = ConstantCost(S_D, S_T)


def signalling_trace(*, honest: bool, sequences: int = 40, depth: int = 8) -> Trace:
    """Tokens accepted with probabilities of their own; the confidence is that probability, or says nothing of it."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(60, 100, sequences).tolist()
    chance = rng.beta(1.2, 0.6, (sum(lengths), depth))
    shown = chance if honest else rng.beta(1.2, 0.6, chance.shape)
    return build_trace(rng, rng.random(chance.shape) < chance, lengths, confidence=shown)


def halves(trace: Trace) -> tuple[PricedTrace, PricedTrace]:
    tuning, held = split_sequences(trace)
    whole = PricedTrace(trace, COST)
    return whole.select(tuning), whole.select(held)


def seconds_by_hand(trace: Trace, least_path: float) -> float:
    """Draft while the product of the confidences is at least `least_path`, by a loop over rounds."""
    total = 0.0
    for start, end in zip(trace.offsets, trace.offsets[1:], strict=False):
        at = int(start)
        while at < end:
            path, drafted = 1.0, 0
            while drafted < min(trace.depth, int(trace.draft_limit[at])):
                path *= float(trace.confidence[at, drafted])
                drafted += 1
                if path < least_path:
                    break
            total += drafted * S_D + S_T
            at += min(drafted, int(trace.match_len[at])) + 1
    return total


def test_the_rule_is_as_fast_as_the_best_threshold_found_by_hand() -> None:
    """With signals that are the acceptance probabilities, the best rule is a threshold on their product."""
    train, held = halves(signalling_trace(honest=True, sequences=160))  # of fewer, chance moves the two by 2 %
    rule = learned_rule(train, SearchSettings(jobs=1))
    own_s = held.replay(rule).speculative_s.sum()
    best_s = min(seconds_by_hand(held.trace, least) for least in np.geomspace(0.02, 0.98, 40))
    oracle_s = chain_oracle_seconds(held.trace, held.table()).sum()
    assert own_s <= 1.02 * best_s and oracle_s < 0.9 * own_s


def test_without_information_the_rule_is_the_best_fixed_draft_length() -> None:
    """The oracle is as far ahead as ever; none of that is for a policy to gain."""
    train, held = halves(signalling_trace(honest=False))
    rule = learned_rule(train, SearchSettings(jobs=1))
    fixed_s = min(held.replay(make_policy("fixed_k", {"k": k})).speculative_s.sum() for k in range(1, 9))
    assert held.replay(rule).speculative_s.sum() == pytest.approx(fixed_s, rel=0.02)
    assert chain_oracle_seconds(held.trace, held.table()).sum() < 0.75 * fixed_s


def test_a_board_shows_the_gap_to_the_rule_beside_the_gap_to_the_oracle() -> None:
    trace = signalling_trace(honest=True)
    kinds = [POLICIES["fixed_k"], POLICIES["max_confidence"]]
    options = {"kinds": kinds, "trials": 8, "replays": 1, "sensitivity": False}
    (board,) = leaderboards({"t": trace}, [COST], **options)
    train, held = halves(trace)
    rule = learned_rule(train, SearchSettings(jobs=1))
    assert board.rule == rule and rule is not None
    rule_s = held.replay(rule).speculative_s.sum()
    for row in board.rows:
        assert row.rule_gap == pytest.approx(row.speculative_s.sum() / rule_s - 1)
        assert row.rule_gap < row.prediction.oracle_regret
        assert row.as_dict()["learned_rule_gap"] == row.rule_gap
    _, rest = split_sequences(trace)
    rows = np.concatenate([np.arange(trace.offsets[s], trace.offsets[s + 1]) for s in rest])
    match = trace.match_len.copy()
    match[rows] = 0
    (spoiled,) = leaderboards({"t": dataclasses.replace(trace, match_len=match)}, [COST], **options)
    assert spoiled.rule == rule  # it learns from the tuning sequences alone


def test_no_rule_without_signals() -> None:
    bare = generate(IID(0.8), sequences=20, output_tokens=60, depth=8)
    (board,) = leaderboards({"t": bare}, [COST], kinds=[POLICIES["fixed_k"]], trials=4, sensitivity=False)
    assert board.rule is None and board.as_dict()["learned_rule_speedup"] is None
    assert all(row.rule_gap is None for row in board.rows)
