"""The oracle against every sequence of draft lengths there is, and against every policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.table import CostTable
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.time_gain import TimeGain
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, build_trace, small_trace


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
        behind = int(drafted == accepted)  # in full, or nothing drafted: the draft cache lacks a token
        t += accepted + 1
    return spent, len(lengths)


@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_of_draft_lengths_is_faster(seed: int) -> None:
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
    table = cost_table(trace, DyadicCost(rng))
    spent = [seconds_of(trace, table, lengths)[0] for lengths in itertools.product(range(depth + 1), repeat=length)]
    assert chain_oracle_seconds(trace, table).tolist() == [min(spent)]


POLICIES: dict[str, Callable[[int, float], ChainPolicy]] = {
    "fixed_k": lambda longest, x: FixedK(k=longest),
    "adaedl": lambda longest, x: AdaEDL(lambda0=x, max_draft_tokens=longest, epsilon=0.5),
    "max_confidence": lambda longest, x: MaxConfidence(lambda0=x, max_draft_tokens=longest, dynamic=False),
    "time_gain": lambda longest, x: TimeGain(cost_ratio=x, max_draft_tokens=longest),
}


@pytest.mark.parametrize("name", POLICIES)
@given(
    seed=st.integers(0, 2**32),
    longest=st.integers(1, 6),
    level=st.floats(0, 1),
    cost=st.sampled_from([RampCost(), ConstantCost(1e-3, 1e-2), ConstantCost(2e-2, 1e-2), RampCost(slope=1e-4)]),
)
def test_no_policy_is_faster(name: str, seed: int, longest: int, level: float, cost: CostModel) -> None:
    trace = small_trace(seed)
    table = cost_table(trace, cost)
    result = replay(trace, POLICIES[name](longest, level), table)
    assert (chain_oracle_seconds(trace, table) <= result.speculative_s * (1 + 1e-12)).all()  # sums in two orders


def test_a_table_compiled_for_another_trace_is_refused() -> None:
    trace = small_trace()
    short = cost_table(trace.select([1]), RampCost())
    with pytest.raises(InputError, match="the oracle needs 7 and"):
        chain_oracle_seconds(trace, short)


def test_a_trace_of_rejection_sampling_sums_over_its_outcomes() -> None:
    """As many outcomes as a replay with this seed sums over, and a bound on it."""
    rng = np.random.default_rng(5)
    exact = small_trace(5)
    chances = rng.random((len(exact.token), exact.depth)).astype(np.float32)
    drawn = replace(exact, accept_prob=chances, meta={**exact.meta, "decoding": {"mode": "rejection"}})
    assert drawn.approximate
    table = cost_table(drawn, RampCost())
    bound = chain_oracle_seconds(drawn, table, seed=3)
    for k in (1, 3, 6):
        result = replay(drawn, FixedK(k=k), table, seed=3)
        assert (bound <= result.speculative_s * (1 + 1e-12)).all()
        assert bound.sum() > 0.2 * result.speculative_s.sum()  # of as many outcomes
    assert chain_oracle_seconds(drawn, table, seed=4).tolist() != bound.tolist()
