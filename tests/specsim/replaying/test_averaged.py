"""Expected replays against a recursion over rounds and against many sampled replays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.hugging_face import HuggingFace
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.p_min import PMin
from specsim.policy.chain.time_gain import TimeGain
from specsim.replaying.expected import MAX_CELLS, draws_uniforms, expected_replay
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.specsim.policy.test_policy import Coin
from tests.specsim.policy.test_thompson import clipped_mean
from tests.support.checks import refusal
from tests.support.reference import Decoder, FixedLength, RampCost, build_trace, copies, recurrent, small_trace

COST = RampCost()
COUNTS = ("num_rounds", "drafted", "accepted", "policy_steps")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Short, of depth at most 4; ended by budget or EOS."""
    count = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 14), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (sum(lengths), draw(st.integers(1, 4)))
    trace = build_trace(
        rng,
        rng.random(shape) < draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
        lengths,
        prompts=draw(st.lists(st.integers(1, 40), min_size=count, max_size=count)),
        spare_budget=draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)),
        ends_by_eos=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        vocabulary=draw(st.sampled_from([4, 100])),
        score=rng.random(shape).astype(np.float32),
    )
    return recurrent(trace) if draw(st.booleans()) else trace


@dataclass
class Expectation:
    """Means over all that can happen, by recursion over rounds from the definition of the algorithms."""

    trace: Trace
    policy: ChainPolicy
    wrong_n: int = 0

    def sequence(self, s: int) -> np.ndarray:
        """rounds, drafted, accepted, policy steps, and seconds in draft, policy, verify, other."""
        trace, start = self.trace, int(self.trace.offsets[s])
        length, prompt = int(trace.output_tokens[s]), int(trace.prompt_tokens[s])
        price, recurs = Decoder(trace, FixedLength(1), COST).price, "second_pass" in trace.meta

        @cache
        def after(t: int, r: int, n: int, m: int, behind: bool) -> Any:
            if t >= length:
                return np.zeros(8)
            row, context = start + t, prompt + t - 1
            limit = min(self.policy.max_draft_tokens, int(trace.draft_limit[row]))
            total, goes_on = np.zeros(8), 1.0
            for drafted in range(min(limit, 1), limit + 1):
                stops = 1.0 if drafted == limit else 1 - self.keep(row, drafted, r, n, m)
                asked = drafted if drafted < limit else max(limit - 1, 0)
                draft_s = drafted and price("draft", drafted, context) + behind * price("catch_up", None, context)
                for accepted in range(drafted + 1):
                    chance = goes_on * stops * self.accepts(row, accepted, drafted)
                    if chance > 0:
                        counts = [1, drafted, accepted, asked]
                        seconds = [draft_s, asked * COST.policy_step()]
                        seconds += [price("verify", drafted + 1, context), COST.round_overhead()]
                        if recurs and accepted < drafted and t + accepted + 1 < length:
                            seconds[2] += price("refeed", accepted + 1, context)
                        judged = min(accepted + 1 + self.printed(), drafted) + self.wrong_n * (accepted < drafted)
                        full = 0 < drafted == accepted
                        rest = after(t + accepted + 1, r + accepted, n + judged, m + 1, full)
                        total = total + chance * (np.array(counts + seconds) + rest)
                goes_on *= 1 - stops
            return total

        result: np.ndarray = after(0, 0, 0, 0, False)
        return result

    def printed(self) -> int:
        return int(self.policy.settings.get("counting") == "printed")

    def accepts(self, row: int, accepted: int, drafted: int) -> float:
        """Chance that just `accepted` of `drafted` tokens are accepted."""
        return float(min(drafted, int(self.trace.match_len[row])) == accepted)

    def keep(self, row: int, depth: int, r: int, n: int, m: int) -> float:
        policy = self.policy
        if isinstance(policy, BetaTS):
            ones = 0 if policy.theta == "per_token" else depth - 1
            return (policy.alpha0 + r + ones) / (policy.alpha0 + policy.beta0 + n + ones)
        if isinstance(policy, CaliTS):
            theta_hat = (policy.theta0 + r) / (1 + n)
            precision = 1 / policy.sigma_m**2 + m / policy.sigma_s**2
            score = float(self.trace.score[row, depth - 1])
            mu = (score / policy.sigma_m**2 + m * theta_hat / policy.sigma_s**2) / precision
            return clipped_mean(mu, 1 / math.sqrt(precision))
        if isinstance(policy, FixedK):
            return float(depth < policy.k)
        assert isinstance(policy, TimeGain)
        return float(np.prod(self.trace.confidence[row, :depth].astype(float)) >= policy.cost_ratio)

    def matches(self, result: Replay) -> bool:
        """To 1e-11: what is left out as negligible, and sums of some hundred terms."""
        wanted = np.array([self.sequence(s) for s in range(self.trace.sequences)])
        columns = np.column_stack([getattr(result, name) for name in COUNTS] + [result.seconds])
        return np.allclose(columns, wanted, rtol=1e-11, atol=1e-13)


POLICIES: dict[str, Callable[..., ChainPolicy]] = {
    "fixed_k": lambda max_draft_tokens: FixedK(k=max_draft_tokens),
    "time_gain": lambda max_draft_tokens: TimeGain(cost_ratio=0.2, max_draft_tokens=max_draft_tokens),
    **{
        f"beta_ts {counting} {theta}": lambda max_draft_tokens, c=counting, t=theta: BetaTS(
            alpha0=1.3, beta0=0.4, counting=c, theta=t, max_draft_tokens=max_draft_tokens
        )
        for counting, theta in product(("exact", "printed"), ("per_token", "per_round"))
    },
    **{
        f"cali_ts {counting}": lambda max_draft_tokens, c=counting: CaliTS(
            theta0=0.7, sigma_m=0.8, sigma_s=0.9, counting=c, max_draft_tokens=max_draft_tokens
        )
        for counting in ("exact", "printed")
    },
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15)
@given(trace=traces(), data=st.data())
def test_expectation_is_the_recursions(name: str, trace: Trace, data: st.DataObject) -> None:
    policy = POLICIES[name](max_draft_tokens=data.draw(st.integers(1, trace.depth)))
    result = expected_replay(trace, policy, cost_table(trace, COST))
    assert Expectation(trace, policy).matches(result)
    assert result.policy == policy and result.rounds is None
    assert result.output_tokens.tolist() == trace.output_tokens.tolist()


def test_the_comparison_catches_wrong_counts_and_draws() -> None:
    trace = build_trace(np.random.default_rng(0), np.random.default_rng(1).random((12, 4)) < 0.7, [12])
    for counting, theta in product(("exact", "printed"), ("per_token", "per_round")):
        policy = BetaTS(counting=counting, theta=theta, max_draft_tokens=4)
        result = expected_replay(trace, policy, cost_table(trace, COST))
        assert Expectation(trace, policy).matches(result)
        assert not Expectation(trace, policy, wrong_n=1).matches(result)
        assert not Expectation(trace, replace(policy, alpha0=1.001)).matches(result)
        for other in ({"counting": "printed"}, {"counting": "exact"}, {"theta": "per_token"}, {"theta": "per_round"}):
            same = replace(policy, **other) == policy
            assert Expectation(trace, replace(policy, **other)).matches(result) == same


def one_sequence(length: int) -> Trace:
    rng = np.random.default_rng(5)
    shape = (length, 8)
    score = rng.uniform(0.3, 1.2, shape).clip(0, 1).astype(np.float32)
    return build_trace(rng, rng.random(shape) < 0.75, [length], score=score, top10_confidence=score)


SAMPLED = [
    *(
        BetaTS(counting=c, theta=t, max_draft_tokens=8)
        for c, t in product(("exact", "printed"), ("per_token", "per_round"))
    ),
    BetaTS(alpha0=0.3, beta0=0.1, theta="per_round", max_draft_tokens=5),
    BetaTS(**BetaTS.PRIORS["strong"], max_draft_tokens=8),
    CaliTS(max_draft_tokens=8),
    CaliTS(counting="printed", theta0=0.9, sigma_m=1.0, sigma_s=0.4, max_draft_tokens=8),
]


def far_off(sampled: np.ndarray, expected: float) -> bool:
    """More than 4 standard errors."""
    return bool(abs(sampled.mean() - expected) > 4 * sampled.std() / math.sqrt(len(sampled)) + 1e-9)


@pytest.mark.parametrize("policy", SAMPLED, ids=str)
def test_sampled_replays_agree_in_the_mean(policy: ChainPolicy) -> None:
    """20,000 draws of 60 tokens; counts, and seconds by part."""
    trace = one_sequence(60)
    expected = expected_replay(trace, policy, cost_table(trace, COST))
    many = copies(trace, 20_000)
    sampled = replay(many, policy, cost_table(many, COST), seed=11)
    for name in COUNTS:
        assert not far_off(getattr(sampled, name), getattr(expected, name)[0]), name
    for part in range(4):
        assert not far_off(sampled.seconds[:, part], expected.seconds[0, part])
    assert not far_off(sampled.speculative_s, expected.speculative_s[0])
    assert expected.speedup == pytest.approx(sampled.speedup, rel=0.01)
    np.testing.assert_allclose(expected.autoregressive_s[0], sampled.autoregressive_s)


@pytest.mark.parametrize(
    "policy",
    [
        FixedK(k=4),
        PMin(p_min=0.3, max_draft_tokens=6),
        TimeGain(cost_ratio=0.3, max_draft_tokens=6),
        MaxConfidence(dynamic=False, max_draft_tokens=6),
        AdaEDL(dynamic=True, epsilon=0.5, max_draft_tokens=6),
        HuggingFace(schedule="heuristic", num_assistant_tokens=3, max_draft_tokens=6),
    ],
    ids=str,
)
def test_what_is_certain_is_the_replay(policy: ChainPolicy) -> None:
    trace = small_trace()
    table = cost_table(trace, COST)
    expected, plain = expected_replay(trace, policy, table), replay(trace, policy, table)
    for name in (*COUNTS, "output_tokens", "seconds", "autoregressive_s"):
        np.testing.assert_array_equal(getattr(expected, name), getattr(plain, name))
    assert all(getattr(expected, name).dtype == np.float64 for name in COUNTS)


def test_who_draws() -> None:
    assert [draws_uniforms(kind) for kind in (BetaTS, CaliTS, Coin)] == [True] * 3
    assert not any(draws_uniforms(kind) for kind in (FixedK, AdaEDL, MaxConfidence, TimeGain, HuggingFace, PMin))


REFUSED: dict[str, tuple[ChainPolicy, str]] = {
    "state carried": (BetaTS(carry=True, max_draft_tokens=6), "keeps its state from sequence to sequence"),
    "theta shared by a round": (CaliTS(theta="per_round", max_draft_tokens=6), "no keep_probability"),
    "no chances given": (Coin(), "no keep_probability"),
    "drafts too deep": (BetaTS(max_draft_tokens=9), "recorded to depth 8"),
}


@pytest.mark.parametrize(("policy", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_averaged_is_refused(policy: ChainPolicy, reason: str) -> None:
    trace = one_sequence(20)
    refusal(lambda: expected_replay(trace, policy, cost_table(trace, COST)), policy.name, match=reason)


@pytest.mark.parametrize("counting", ["exact", "printed"])
def test_a_sequence_too_long_to_average_is_refused_with_the_length_that_fits(counting: str) -> None:
    length = 1 + int(math.sqrt(MAX_CELLS / 10))
    policy = BetaTS(counting=counting, max_draft_tokens=8)
    trace = one_sequence(length)
    with pytest.raises(InputError, match=rf"of {length} tokens is too long to average .*about (\d+) fit") as caught:
        expected_replay(trace, policy, cost_table(trace, COST))
    fits = int(str(caught.value).split("about ")[1].split()[0])
    misses = 1 if counting == "exact" else 2
    assert 0.99 * MAX_CELLS < 10 * fits * misses * fits < MAX_CELLS


def test_a_long_sequence_is_averaged_too() -> None:
    """400 tokens, where chances become negligible and layers come round often; all tokens are accounted for."""
    trace = one_sequence(400)
    policy = BetaTS(counting="printed", max_draft_tokens=8)
    expected = expected_replay(trace, policy, cost_table(trace, COST))
    assert expected.accepted[0] + expected.num_rounds[0] == pytest.approx(400, abs=1e-9)
    many = copies(trace, 2000)
    sampled = replay(many, policy, cost_table(many, COST))
    assert not far_off(sampled.num_rounds, expected.num_rounds[0]) and not far_off(sampled.drafted, expected.drafted[0])
