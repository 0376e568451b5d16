"""Oracles of chains, trees and joined traces: by enumeration, against each other, and beyond every policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cost.joined import JoinedCost
from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.table import CostTable
from specsim.io.errors import InputError
from specsim.learn.fit import fit
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import BEST_FIXED_K, tune_on
from specsim.policy.base import Policy
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.time_gain import TimeGain
from specsim.policy.registry import SWITCH_POLICIES, make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.cape import Cape
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.pct import PCT
from specsim.policy.tree.vct import VCT
from specsim.replaying.oracles import chain_oracle_seconds, reachable_depth, tree_oracle_seconds
from specsim.replaying.prediction import oracle_seconds, predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.joined_traces import joined_trace
from tests.support.reference import RampCost, build_trace, recurrent, small_trace
from tests.support.tree_traces import tree_trace


class DyadicCost(CostModel):
    """Times that are multiples of 1/64 second, so that sums are exact in any order."""

    def __init__(self, rng: np.random.Generator, tokens: int = 12) -> None:
        self.step_s, self.pass_s = rng.integers(1, 40, tokens) / 64, rng.integers(20, 80, tokens) / 64

    def draft(self, n_tokens: int, context: Any) -> Any:
        return self.step_s[:n_tokens].sum() + n_tokens * (np.asarray(context) // 16) / 64

    def catch_up(self, context: Any) -> Any:
        return 5 / 64 + np.asarray(context) // 16 / 64

    def verify(self, n_tokens: int, context: Any) -> Any:
        return self.pass_s[n_tokens] + np.asarray(context) // 16 / 32

    def policy_step(self) -> float:
        return 0.0

    def round_overhead(self) -> float:
        return 3 / 64

    def autoregressive_step(self, context: Any) -> Any:
        return 0.5 + np.zeros(np.shape(context))


def seconds_of(trace: Trace, table: CostTable, lengths: tuple[int, ...]) -> tuple[float, int]:
    """Seconds of the first sequence with these draft lengths, and how many of them were needed."""
    t = spent = 0.0
    behind = 0
    for number, wanted in enumerate(lengths):
        row = int(t)
        if row >= trace.output_tokens[0]:
            return spent, number
        drafted = min(wanted, int(trace.draft_limit[row]))
        accepted = min(drafted, int(trace.match_len[row]))
        bucket = int(trace.prompt_tokens[0]) - 1 + row >> table.bucket_bits
        if drafted:
            spent += table.draft_s[drafted, bucket] + behind * table.catch_up_s[bucket]
        spent += table.verify_s[drafted + 1, bucket] + table.round_overhead_s
        if accepted < drafted and row + accepted + 1 < trace.output_tokens[0]:
            spent += table.refeed_s[accepted + 1, bucket]  # 0 unless the target has recurrent layers
        behind = int(drafted == accepted)  # in full, or nothing drafted: the draft cache lacks a token
        t += accepted + 1
    return spent, len(lengths)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_of_draft_lengths_is_faster(seed: int, again: bool) -> None:
    """Every choice of 0..3 tokens in each of at most 5 rounds, the seconds exact."""
    rng = np.random.default_rng(seed)
    length, depth = int(rng.integers(1, 6)), 3
    trace = build_trace(
        rng,
        rng.random((length, depth)) < rng.choice([0.3, 0.7, 0.95]),
        [length],
        prompts=[int(rng.integers(1, 40))],
        spare_budget=[int(rng.integers(0, 3))],
        ends_by_eos=[bool(rng.integers(2))],
        vocabulary=4,
    )
    trace = recurrent(trace) if again else trace
    table = cost_table(trace, DyadicCost(rng))
    spent = [seconds_of(trace, table, lengths)[0] for lengths in itertools.product(range(depth + 1), repeat=length)]
    assert chain_oracle_seconds(trace, table).tolist() == [min(spent)]


CHAINS: dict[str, Callable[[int, float], ChainPolicy]] = {
    "fixed_k": lambda longest, x: FixedK(k=longest),
    "adaedl": lambda longest, x: AdaEDL(lambda0=x, max_draft_tokens=longest, epsilon=0.5),
    "max_confidence": lambda longest, x: MaxConfidence(lambda0=x, max_draft_tokens=longest, dynamic=False),
    "time_gain": lambda longest, x: TimeGain(cost_ratio=x, max_draft_tokens=longest),
}


@pytest.mark.parametrize("name", CHAINS)
@given(
    seed=st.integers(0, 2**32),
    longest=st.integers(1, 6),
    level=st.floats(0, 1),
    cost=st.sampled_from([RampCost(), ConstantCost(1e-3, 1e-2), ConstantCost(2e-2, 1e-2), RampCost(slope=1e-4)]),
)
def test_no_policy_is_faster(name: str, seed: int, longest: int, level: float, cost: CostModel) -> None:
    trace = small_trace(seed)
    table = cost_table(trace, cost)
    result = replay(trace, CHAINS[name](longest, level), table)
    assert (chain_oracle_seconds(trace, table) <= result.speculative_s * (1 + 1e-12)).all()  # sums in two orders


def test_a_table_compiled_for_another_trace_is_refused() -> None:
    trace = small_trace()
    short = cost_table(trace.select([1]), RampCost())
    refusal(lambda: chain_oracle_seconds(trace, short), "the oracle needs 7 and")


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
    trace = replace(trace, prompt_tokens=rng.integers(1, 40, 1), budget_tokens=trace.budget_tokens + rng.integers(0, 4))
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
TREES = st.one_of(
    st.builds(VCT, width=st.integers(1, 3), depth=st.integers(1, 3), level_nodes=st.integers(1, 9)),
    st.builds(Cape, width_30=WIDTHS, width_60=WIDTHS, width_80=WIDTHS, width_100=WIDTHS, depth=st.integers(1, 5)),
    st.builds(Eagle2, nodes=st.integers(1, 30), depth=st.integers(1, 5), top_k=WIDTHS),
    st.builds(PCT, cost_ratio=st.floats(0.05, 1), width=WIDTHS, max_depth=st.integers(1, 5), max_nodes=st.just(30)),
)


@settings(max_examples=120, deadline=None)
@given(policy=TREES, seed=st.integers(0, 30), cost=st.integers(0, 30))
def test_no_tree_policy_is_faster(policy: TreePolicy, seed: int, cost: int) -> None:
    trace = tree_trace(seed)
    table = cost_table(trace, DyadicTreeCost(np.random.default_rng(cost)))
    assert (tree_oracle_seconds(trace, table) <= replay(trace, policy, table).speculative_s + 1e-9).all()


def test_it_drafts_just_what_is_accepted() -> None:
    """Ranks 1 0 2 and then none below the width: a round of 3 levels and 3 nodes, then a token at a time."""
    trace = tree_trace(0, sequences=1, tokens=6, depth=3, width=3)
    ranks = np.full((6, 3), 7, dtype=np.int16)
    ranks[0] = 1, 0, 2
    trace = replace(trace, true_rank=ranks)
    assert reachable_depth(trace).tolist() == [3, 0, 0, 0, 0, 0]
    assert reachable_depth(trace, 2).tolist() == [2, 0, 0, 0, 0, 0]
    table = cost_table(trace, ConstantCost(1.0, 8.0))
    assert tree_oracle_seconds(trace, table).tolist() == [3 + 3 * 8.0]
    assert tree_oracle_seconds(trace, table, 2).tolist() == [2 + 4 * 8.0]
    assert tree_oracle_seconds(trace, table, 1).tolist() == [6 * 8.0]
    # Without recorded trees any rank will do: after the first round another of a single level.
    assert tree_oracle_seconds(replace(trace, tree=None), table).tolist() == [3 + 1 + 2 * 8.0]


def test_what_is_missing_is_named() -> None:
    trace = tree_trace(0)
    table = cost_table(trace, ConstantCost(1e-3, 1e-2))
    refusal(lambda: tree_oracle_seconds(small_trace(), cost_table(small_trace(), RampCost())), "true_rank")
    refusal(lambda: tree_oracle_seconds(trace, replace(table, tree=None)), "costs of trees")
    with pytest.raises(InputError, match="compile them for this trace"):
        tree_oracle_seconds(trace, cost_table(trace.select([0]), ConstantCost(1e-3, 1e-2)))
    with pytest.raises(InputError, match="rejection"):
        tree_oracle_seconds(replace(trace, meta={**trace.meta, "decoding": {"mode": "rejection"}}), table)


COST = JoinedCost((RampCost(), RampCost(1e-6), ConstantCost(5e-4, 1e-2)))


def least_by_trying(trace: JoinedTrace, cost: JoinedCost, sequence: int) -> float:
    """All choices of drafter and length, position by position."""
    start, end = trace.offsets[sequence : sequence + 2].tolist()
    prompt = int(trace.prompt_tokens[sequence])
    low, high = trace.prompt_tokens.min() - 1, (trace.prompt_tokens + trace.output_tokens).max() - 2

    @cache
    def least(row: int) -> float:
        if row >= end:
            return 0.0
        context = np.clip(((prompt + row - start - 1) // 16 + 0.5) * 16, low, high)
        seconds = []
        for part, own in zip(trace.parts, cost.parts, strict=True):
            for k in range(int(part.draft_limit[row]) + 1):
                draft_s = float(own.draft(k, context)) if k else 0.0
                took = draft_s + float(own.verify(k + 1, context)) + own.round_overhead()
                seconds.append(took + least(row + min(k, int(part.match_len[row])) + 1))
        return min(seconds)

    return least(start)


def test_the_oracle_is_the_least_of_all_choices() -> None:
    trace = joined_trace(sequences=3)
    oracle_s = oracle_seconds(PricedTrace(trace, COST), [SWITCH_POLICIES["switch_match"]])
    assert oracle_s.tolist() == pytest.approx([least_by_trying(trace, COST, s) for s in range(3)], rel=1e-12)


def test_no_policy_and_no_single_drafter_is_faster() -> None:
    for seed in range(4):
        priced = PricedTrace(joined_trace(seed=seed), COST)
        assert isinstance(priced.trace, JoinedTrace)
        oracle_s = oracle_seconds(priced, list(SWITCH_POLICIES.values()))
        for kind in SWITCH_POLICIES.values():
            policy: Policy = fit(kind, {"k1": 5, "k2": 3, "k3": 4}, priced.trace, priced.table())
            assert (priced.replay(policy).speculative_s >= oracle_s * (1 - 1e-12)).all(), policy
            regret = predict_policy(priced, policy).oracle_regret
            assert regret >= 0
        for part, cost in zip(priced.trace.parts, COST.parts, strict=True):
            alone = chain_oracle_seconds(part, PricedTrace(part, cost).table())
            assert (alone >= oracle_s * (1 - 1e-12)).all()


def test_tuning_compares_with_the_best_fixed_k_of_any_drafter() -> None:
    trace = joined_trace(sequences=12, drafters=2)
    cost = JoinedCost((ConstantCost(1e-4, 1e-2), ConstantCost(2e-3, 1e-2)))
    train, holdout = PricedTrace(trace.select(range(6)), cost), PricedTrace(trace.select(range(6, 12)), cost)
    result = tune_on(SWITCH_POLICIES["switch_match"], train, holdout, SearchSettings(trials=40, jobs=1))
    best = result.references[BEST_FIXED_K].prediction.policy
    tried = [
        (train.replay(make_policy("one_drafter", {"drafter": n, "k1": k, "k2": k})).seconds.sum(), n, k)
        for n in (1, 2)
        for k in range(1, trace.depth + 1)
    ]
    _, drafter, k = min(tried)
    assert (best.settings["drafter"], best.settings[f"k{drafter}"]) == (drafter, k)
    assert result.best.settings["k3"] == 1 and result.best.settings["floor3"] == 0.0  # of a drafter that is not there
    assert result.as_dict()["oracle_of"] == "drafters and chains"
    tuned_s = train.replay(result.best).seconds.sum()
    assert tuned_s <= train.replay(make_policy("switch_match")).seconds.sum()
