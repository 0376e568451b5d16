"""Replay against plain decoding and against hand-worked rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.replay import Replay, replay
from specsim.replaying.rounds import PARTS
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import (
    Decoder,
    FixedLength,
    RampCost,
    Threshold,
    build_trace,
    draft_confidence,
    entropy_score,
    recurrent,
)

COST = RampCost()
PARTS_S = [f"{part}_s" for part in PARTS]
# Entropies whose score 1 - sqrt(H/4) is exact in binary, so that it can equal lambda.
TIED_ENTROPY = np.array([0.0, 0.25, 1.0, 2.25, 4.0, 9.0, 16.0, 36.0])
SCORES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 5))

    def each(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=count, max_size=count))

    lengths = each(st.one_of(st.just(1), st.integers(1, 40)))
    depth = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (sum(lengths), depth)
    tied = draw(st.booleans())
    trace = build_trace(
        rng,
        rng.random(shape) < draw(st.sampled_from([0.0, 0.4, 0.8, 0.95, 1.0])),
        lengths,
        prompts=each(st.integers(1, 60)),
        spare_budget=each(st.integers(0, 12)),
        ends_by_eos=each(st.booleans()),
        vocabulary=draw(st.integers(2, 12)),  # small: a wrong draft is often EOS
        confidence=rng.integers(0, 9, shape) / 8 if tied else None,
        entropy_nats=rng.choice(TIED_ENTROPY, shape) if tied else None,
    )
    trace = recurrent(trace) if draw(st.booleans()) else trace
    eos = draw(st.sampled_from([0, [0], [0, 1], None]))
    if eos in (0, [0]):
        return replace(trace, meta={**trace.meta, "eos_token_id": eos})
    # With none, or with two, the second inside the text, outputs end by their budget only.
    return replace(trace, meta={**trace.meta, "eos_token_id": eos}, budget_tokens=np.array(lengths))


@st.composite
def cases(draw: st.DrawFn, name: str, dynamic: bool) -> tuple[Trace, ChainPolicy, FixedLength | Threshold]:
    trace = draw(traces())
    longest = draw(st.integers(1, trace.depth))
    if name == "fixed_k":
        return trace, FixedK(k=longest), FixedLength(longest)
    common = {
        "lambda0": draw(SCORES if name == "adaedl" else SCORES.map(abs).map(lambda x: min(x, 1.0))),
        "dynamic": dynamic,
        "target_rate": draw(st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.9, 1.0])),
        "epsilon": draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])),
        "max_draft_tokens": longest,
    }
    policy: ChainPolicy
    if name == "adaedl":
        gamma = draw(st.sampled_from([0.25, 0.2, 1.0]))
        policy, score = AdaEDL(gamma=gamma, **common), entropy_score(gamma)
    else:
        policy, score = MaxConfidence(**common), draft_confidence
    rule = Threshold(score, common["lambda0"], dynamic, common["target_rate"], common["epsilon"], longest)
    return trace, policy, rule


KINDS = [
    ("fixed_k", False),
    ("max_confidence", False),
    ("max_confidence", True),
    ("adaedl", False),
    ("adaedl", True),
]


def assert_same(result: Replay, decoder: Decoder) -> None:
    """Rounds and counts are equal, seconds of both to 1e-12: sums of at most 1e3 terms in two orders."""
    decoded, count = decoder.run(), len(result.num_rounds)
    seconds = result.rounds.to_frame()[[*PARTS_S, "baseline_s"]]
    np.testing.assert_allclose(seconds, decoded.round_s, rtol=1e-12, atol=1e-15)
    assert [row[:4] for row in result.rounds.rows()] == decoded.rounds
    assert result.num_rounds.tolist() == np.bincount([row[0] for row in decoded.rounds], minlength=count).tolist()
    assert result.drafted.tolist() == decoded.total(2, count)
    assert result.accepted.tolist() == decoded.total(3, count)
    assert result.policy_steps.tolist() == decoded.policy_steps
    np.testing.assert_allclose(result.seconds, decoded.seconds, rtol=1e-12, atol=0)
    np.testing.assert_allclose(result.autoregressive_s, decoded.autoregressive_s, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("name", "dynamic"), KINDS)
@given(data=st.data())
def test_replay_equals_plain_decoding_round_for_round(data: st.DataObject, name: str, dynamic: bool) -> None:
    trace, policy, rule = data.draw(cases(name, dynamic))
    result = replay(trace, policy, cost_table(trace, COST), log=True)
    assert_same(result, Decoder(trace, rule, COST))


def without_bonus(rest: list[int], drafted: int, accepted: int) -> list[int]:
    return [] if 0 < drafted == accepted else rest[:1]


def break_bonus(decoder: Decoder) -> None:
    decoder.from_target = without_bonus


def break_failing_token(decoder: Decoder) -> None:
    decoder.stopped = lambda draft: draft[:-1] or draft


def break_eos(decoder: Decoder) -> None:
    decoder.ends_draft = lambda token: False


def break_line_11(decoder: Decoder) -> None:
    assert isinstance(decoder.rule, Threshold)
    decoder.rule.length_judged_by_line_11 = lambda drafted, accepted: accepted


def break_reset(decoder: Decoder) -> None:
    decoder.rule.begin_sequence()
    decoder.rule.begin_sequence = lambda: None


def leave_intact(decoder: Decoder) -> None:
    pass


@pytest.mark.parametrize(
    "damage", [break_bonus, break_failing_token, break_eos, break_line_11, break_reset, leave_intact]
)
def test_the_comparison_catches_a_wrong_rule(damage: Callable[[Decoder], None]) -> None:
    rng = np.random.default_rng(1)
    lengths = [120] * 8
    trace = build_trace(rng, rng.random((960, 6)) < 0.92, lengths, vocabulary=12)
    policy = AdaEDL(lambda0=0.2, target_rate=0.6, epsilon=0.3, max_draft_tokens=6)
    decoder = Decoder(trace, Threshold(entropy_score(0.2), 0.2, True, 0.6, 0.3, 6), COST)
    damage(decoder)
    result = replay(trace, policy, cost_table(trace, COST), log=True)
    if damage is leave_intact:
        assert_same(result, decoder)
    else:
        with pytest.raises(AssertionError):
            assert_same(result, decoder)


def test_rounds_worked_by_hand() -> None:
    """Prompt 3, y = 5 6 7 8 9 EOS, budget 6, K = 3, D = 3.

    t=0 drafts 5 6 4: two accepted, 7 corrected. t=3 drafts 8 EOS and stops at the EOS it
    proposed: one accepted, 9 corrected. t=5 has budget for the target's token only.
    """
    trace = Trace(
        meta={"eos_token_id": 0},
        sequence_id=np.array([1]),
        domain=np.array(["code"]),
        prompt_tokens=np.array([3]),
        budget_tokens=np.array([6]),
        offsets=np.array([0, 6]),
        token=np.array([5, 6, 7, 8, 9, 0], dtype=np.int32),
        match_len=np.array([2, 0, 0, 1, 0, 1], dtype=np.uint8),
        draft_token=np.array([[5, 6, 4], [1, 1, 1], [1, 1, 1], [8, 0, 9], [1, 1, 1], [0, 1, 1]], dtype=np.int32),
        prob=np.ones((6, 3), dtype=np.float32),
        confidence=np.ones((6, 3), dtype=np.float32),
        entropy_nats=np.ones((6, 3), dtype=np.float32),
    )
    result = replay(trace, FixedK(k=3), cost_table(trace, ConstantCost(1.0, 10.0)), log=True)
    assert result.rounds.rows() == [(0, 0, 3, 2, 3, 2), (0, 3, 2, 1, 2, 1), (0, 5, 0, 0, 0, 0)]
    assert result.seconds.tolist() == [[5.0, 0.0, 30.0, 0.0]]
    assert result.rounds.to_frame()[[*PARTS_S, "baseline_s"]].to_numpy().tolist() == [
        [3.0, 0.0, 10.0, 0.0, 30.0],
        [2.0, 0.0, 10.0, 0.0, 20.0],
        [0.0, 0.0, 10.0, 0.0, 10.0],
    ]
    assert result.autoregressive_s.tolist() == [60.0]
    assert result.speedup == 60 / 35


def test_logging_changes_nothing_and_is_off_by_default() -> None:
    trace = build_trace(np.random.default_rng(0), np.random.default_rng(1).random((50, 4)) < 0.7, [30, 20])
    table, policy = cost_table(trace, COST), MaxConfidence(max_draft_tokens=4)
    plain, logged = replay(trace, policy, table), replay(trace, policy, table, log=True)
    assert plain.rounds is None
    np.testing.assert_array_equal(plain.seconds, logged.seconds)
    assert len(logged.rounds) == logged.num_rounds.sum()


def test_a_draft_deeper_than_the_trace_is_refused() -> None:
    trace = build_trace(np.random.default_rng(0), np.ones((4, 2), dtype=bool), [4])
    with pytest.raises(InputError, match=r"drafts up to 3 tokens, the trace is recorded to depth 2"):
        replay(trace, FixedK(k=3), cost_table(trace, COST))


def test_a_table_compiled_for_another_trace_is_refused() -> None:
    def trace_of(length: int, depth: int) -> Trace:
        return build_trace(np.random.default_rng(0), np.ones((length, depth), dtype=bool), [length])

    with pytest.raises(InputError, match=r"drafts of up to 2 tokens.* needs 4"):
        replay(trace_of(40, 4), FixedK(k=4), cost_table(trace_of(40, 2), COST))
    with pytest.raises(InputError, match=r"contexts below 32.* needs .*78"):
        replay(trace_of(60, 4), FixedK(k=4), cost_table(trace_of(8, 4), COST))
