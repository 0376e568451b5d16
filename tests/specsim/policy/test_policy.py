"""One contract for every policy, and AdaEDL's Algorithm 1 by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numba as nb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.io.rng import uniform
from specsim.learn.fit import fit
from specsim.policy.base import build_policy, setting
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.chain.dynamic_threshold import update_threshold
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.p_min import LlamaCpp
from specsim.policy.registry import CHAIN_POLICIES, POLICIES, make_policy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import RampCost, build_trace, small_trace


@nb.njit
def coin_state(params):
    return (0.0,)


@nb.njit
def coin_keep(state, params, step, depth, u):
    return u < (0.6 * step.score + 0.4 * step.prob) ** (1.0 + state[0]), state


@nb.njit
def coin_update(state, params, drafted, accepted):
    return (params.caution * (drafted - accepted),)


@dataclass(frozen=True)
class Coin(ChainPolicy):
    """A random policy of a user: rather stop where prediction is low or after rejections; it says no chance of it."""

    caution: float = setting(0.2, 0.0, 9.0, tune=(0.01, 1.0), log=True)
    max_draft_tokens: int = setting(6, 1, 256, bounds="depth")

    name = "coin"
    source = "this test"
    features = ("prob", "score")
    initial_state = staticmethod(coin_state)
    keep_drafting = staticmethod(coin_keep)
    update = staticmethod(coin_update)


KINDS = {**CHAIN_POLICIES, "coin": Coin}
every_policy = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
DEPTH = 6


def traced(seed: int = 0) -> Trace:
    score, top10_confidence = np.random.default_rng(seed + 1).random((2, 102, DEPTH)).astype(np.float32)
    return small_trace(seed, score=score, top10_confidence=top10_confidence)


def fitting(kind: type[ChainPolicy]) -> dict[str, Any]:
    """Settings that keep drafts within the recorded depth, and stop some of them."""
    names = {field.name for field in dataclasses.fields(kind)}
    stops = {"p_min": 0.4} if "p_min" in names else {}
    return {"max_draft_tokens" if "max_draft_tokens" in names else "k": DEPTH, **stops}


@st.composite
def settings_of(draw: st.DrawFn, kind: type[ChainPolicy]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        low, high = field.metadata["low"], field.metadata["high"]
        if isinstance(field.default, tuple):  # a fitted table: its length means something
            values[field.name] = field.default
        elif isinstance(field.default, str):
            values[field.name] = draw(st.sampled_from(field.metadata["choices"]))
        elif isinstance(field.default, bool):
            values[field.name] = draw(st.booleans())
        elif isinstance(field.default, int):
            values[field.name] = draw(st.integers(low, high))
        else:
            values[field.name] = draw(st.floats(low, high))
    return values


def drive(policy: ChainPolicy, trace: Trace, seed: int) -> list[list[int]]:
    """The loop of a real run: the policy's functions called singly from Python."""
    rounds = []
    score = trace.confidence if trace.score is None else trace.score
    top10_confidence = trace.confidence if trace.top10_confidence is None else trace.top10_confidence
    state: Any = None
    for s, identity in enumerate(trace.sequence_id.tolist()):
        start, end = trace.offsets[s : s + 2].tolist()
        if state is None or not policy.carries_state:
            state = policy.initial_state(policy.params)
        row = start
        while row < end:
            limit = min(policy.max_draft_tokens, int(trace.draft_limit[row]))
            drafted, dropped = 0, False
            while drafted < limit:
                drafted += 1
                columns = (trace.prob, trace.confidence, trace.entropy_nats, score, top10_confidence)
                step = Step(*(float(column[row, drafted - 1]) for column in columns))
                u = uniform(seed, identity, row - start, drafted)
                if drafted < limit or policy.drops_refused:
                    proceed, state = policy.keep_drafting(state, policy.params, step, drafted, u)
                    if not proceed:
                        dropped = policy.drops_refused
                        break
            verified = drafted - dropped
            accepted = min(verified, int(trace.match_len[row]))
            if drafted:
                state = policy.update(state, policy.params, verified, accepted)
            rounds.append([s, row - start, drafted, accepted, verified])
            row += accepted + 1
    return rounds


@every_policy
def test_defaults_are_legal_and_named(kind: type[ChainPolicy]) -> None:
    policy = kind()
    assert policy.name in str(policy) and policy.source
    assert policy.settings == {field.name: field.default for field in dataclasses.fields(kind)}
    assert len(policy.params) == len(policy.settings)
    for field, seen in zip(dataclasses.fields(kind), policy.params, strict=True):
        if isinstance(field.default, tuple):
            assert seen.dtype == np.float64 and seen.tolist() == list(field.default)
        elif isinstance(field.default, str):
            assert field.metadata["choices"][int(seen)] == field.default
        else:
            assert seen == field.default and isinstance(seen, float)
    assert 1 <= policy.max_draft_tokens <= 256
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.max_draft_tokens = 3


def test_the_table_of_policies_is_keyed_by_their_names() -> None:
    assert all(kind.name == name for name, kind in POLICIES.items())
    assert {"fixed_k", "max_confidence", "adaedl"} <= set(POLICIES)
    assert isinstance(make_policy("fixed_k"), FixedK)


@every_policy
def test_features_name_what_is_recorded(kind: type[ChainPolicy]) -> None:
    recorded = {field.name for field in dataclasses.fields(Trace)}
    assert set(kind.features) <= recorded & set(Step._fields)


@every_policy
@given(data=st.data())
def test_settings_survive_the_round_trip_through_text(data: st.DataObject, kind: type[ChainPolicy]) -> None:
    policy = kind(**data.draw(settings_of(kind)))
    assert build_policy(kind, {name: as_text(value) for name, value in policy.settings.items()}) == policy
    assert build_policy(kind, policy.settings) == policy
    assert build_policy(kind, json.loads(json.dumps(policy.settings))) == policy


def as_text(value: Any) -> str:
    """A setting as text on a command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@every_policy
def test_search_ranges_lie_inside_the_legal_ones(kind: type[ChainPolicy]) -> None:
    tuned = [field for field in dataclasses.fields(kind) if field.metadata["tune"]]
    assert tuned
    for field in tuned:
        if isinstance(field.default, str):
            assert field.default in field.metadata["choices"]
            continue
        low, high = field.metadata["tune"]
        assert low < high
        assert not field.metadata["log"] or low > 0
        for value in (low, high):
            assert getattr(build_policy(kind, {field.name: str(value)}), field.name) == value


@every_policy
@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_python_calls_decide_like_the_kernel(kind: type[ChainPolicy], seed: int) -> None:
    tuned = [field for field in dataclasses.fields(kind) if field.metadata["tune"]]
    extremes: list[dict[str, Any]] = [{}]
    for field in dataclasses.fields(kind):
        if isinstance(field.default, str):
            extremes += [{field.name: choice} for choice in field.metadata["choices"]]
        elif isinstance(field.default, bool):
            extremes.append({field.name: not field.default})
        elif field in tuned:
            extremes.append({field.name: field.metadata["tune"][0]})
    for changes in extremes:
        policy, trace = kind(**{**fitting(kind), **changes}), traced(seed % 7)
        result = replay(trace, policy, cost_table(trace, RampCost()), seed=seed, log=True)
        assert [list(row[:5]) for row in result.rounds.rows()] == drive(policy, trace, seed)


@every_policy
@given(data=st.data())
def test_compiled_functions_equal_their_python_source(data: st.DataObject, kind: type[ChainPolicy]) -> None:
    policy = kind(**data.draw(settings_of(kind)))
    state = policy.initial_state(policy.params)
    assert state == policy.initial_state.py_func(policy.params)
    for _ in range(3):
        step = Step(*(data.draw(st.floats(0, high)) for high in (1, 1, 12, 1, 1)))
        u = data.draw(st.floats(0, 1, exclude_min=True, exclude_max=True))
        depth, drafted = data.draw(st.integers(1, 256)), data.draw(st.integers(1, 256))
        accepted = data.draw(st.integers(0, drafted))
        # Compiled and interpreted transcendental functions may differ in the last place.
        proceed, after = policy.keep_drafting(state, policy.params, step, depth, u)
        expected, after_expected = policy.keep_drafting.py_func(state, policy.params, step, depth, u)
        assert proceed == expected and after == pytest.approx(after_expected, rel=1e-12)
        next_state = policy.update(after, policy.params, drafted, accepted)
        assert next_state == pytest.approx(policy.update.py_func(after, policy.params, drafted, accepted), rel=1e-12)
        for new_state in (after, next_state):
            assert len(new_state) == len(state) and all(isinstance(value, float) for value in new_state)
        state = next_state


@every_policy
def test_only_declared_features_are_read(kind: type[ChainPolicy]) -> None:
    trace = traced()
    other = np.random.default_rng(9).permuted(traced(5).prob).reshape(trace.prob.shape)
    undeclared = set(Step._fields) - set(kind.features)
    changed = replace(trace, **dict.fromkeys(undeclared, other))
    policy, table = kind(**fitting(kind)), cost_table(trace, RampCost())

    def rows(of: Trace) -> list[tuple[int, ...]]:
        rounds = replay(of, policy, table, log=True).rounds
        return rounds.rows()

    assert rows(changed) == rows(trace)
    for name in kind.features:
        blind = replace(trace, **{name: np.zeros_like(other)})
        assert rows(blind) != rows(trace), name


def test_a_policy_that_needs_an_unrecorded_column_is_refused() -> None:
    trace = small_trace()
    with pytest.raises(InputError, match=r"policy coin needs the column 'score', which this trace lacks"):
        replay(trace, Coin(), cost_table(trace, RampCost()))


def test_seeds_matter_to_random_policies_only() -> None:
    trace = traced()
    table = cost_table(trace, RampCost())

    def log(policy: ChainPolicy, seed: int) -> list[tuple[int, ...]]:
        result = replay(trace, policy, table, seed=seed, log=True).rounds
        return result.rows()

    assert log(Coin(), 1) == log(Coin(), 1) != log(Coin(), 2)
    assert log(FixedK(k=3), 1) == log(FixedK(k=3), 2)


def message(kind: type[ChainPolicy], settings: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        build_policy(kind, settings)
    assert "\n" not in str(caught.value) and kind.name in str(caught.value)
    return str(caught.value)


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        make_policy("adaedI")
    assert "'adaedI'" in str(caught.value) and all(name in str(caught.value) for name in POLICIES)


@every_policy
def test_an_unknown_setting_is_answered_with_the_known_ones(kind: type[ChainPolicy]) -> None:
    text = message(kind, {"lamda": 0.5})
    assert "'lamda'" in text and all(field.name in text for field in dataclasses.fields(kind))


@every_policy
def test_a_value_out_of_range_is_answered_with_the_range(kind: type[ChainPolicy]) -> None:
    for field in dataclasses.fields(kind):
        if isinstance(field.default, bool | str | tuple):
            continue
        low, high = field.metadata["low"], field.metadata["high"]
        for value in (low - 1, high + 1, str(low - 1), str(high + 1)):
            text = message(kind, {field.name: value})
            assert f"{field.name}={value}" in text and f"[{low:g}, {high:g}]" in text


@every_policy
def test_what_is_no_number_is_refused(kind: type[ChainPolicy]) -> None:
    bad: dict[type, list[Any]] = {
        float: ["nan", math.nan, "inf", math.inf, "high", "", None, [0.5], True],
        int: ["2.5", 2.5, "nan", math.nan, "many", "", None, [1], True],
        bool: ["maybe", "", "2", None, 0.5, 1],
        str: ["", "unheard of", None, 1, True],
        tuple: ["", "1,x", None, 0.5, (0.5, "x"), ()],
    }
    for field in dataclasses.fields(kind):
        for value in bad[type(field.default)]:
            text = message(kind, {field.name: value})
            assert f"{field.name}={value!r}" in text or f"{field.name}={value}" in text


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("1", True), ("0", False)])
def test_true_and_false_are_read_from_text(text: str, value: bool) -> None:
    assert make_policy("adaedl", {"dynamic": text}).settings["dynamic"] is value


def test_numpy_numbers_are_numbers() -> None:
    assert FixedK(k=np.int64(3)) == FixedK(k=3)


# AdaEDL Algorithm 1 with the paper's beta_1 = 0.5, beta_2 = 0.9, epsilon = 0.01, alpha = 0.9, L = 16.
# (lambda, AR), drafted, accepted -> (lambda, AR)
BY_HAND = {
    # AR = 0.5 * 0 + 0.5 * 4/4 = 0.5 < 0.9: lambda = 0.9 * 0.3 + 0.1 * 0.31
    "first round raises lambda whatever was accepted": ((0.3, 0.0), 4, 4, (0.301, 0.5)),
    # AR = 0.5 * 0.8 + 0.5 * 1/4 = 0.525: lambda = 0.9 * 0.5 + 0.1 * 0.51
    "below the target rate lambda rises": ((0.5, 0.8), 4, 1, (0.501, 0.525)),
    # AR = 0.5 * 0.9 + 0.5 * 1 = 0.95: lambda = 0.9 * 0.5 + 0.1 * 0.49
    "above it, drafting less than L lowers lambda": ((0.5, 0.9), 5, 5, (0.499, 0.95)),
    # AR = 0.95 with d = L
    "above it, drafting L holds lambda": ((0.5, 0.9), 16, 16, (0.5, 0.95)),
    # AR = 0.5 * 1 + 0.5 * 15/16 = 0.96875, d = L but a != L: the printed line 11 would lower lambda
    "line 11 counts drafted, not accepted tokens": ((0.5, 1.0), 16, 15, (0.5, 0.96875)),
    # AR = 0.5 * 0.8 + 0.5 * 1 = 0.9 is not below alpha
    "at the target rate exactly lambda falls": ((0.5, 0.8), 2, 2, (0.499, 0.9)),
    # 0.9 * 1 + 0.1 * 1.01 = 1.001
    "lambda is capped at 1": ((1.0, 0.0), 1, 0, (1.0, 0.0)),
    # 0.9 * 0 + 0.1 * -0.01
    "lambda may fall below 0": ((0.0, 1.0), 3, 3, (-0.001, 1.0)),
}


@pytest.mark.parametrize(("before", "drafted", "accepted", "after"), BY_HAND.values(), ids=BY_HAND)
def test_algorithm_1(before: tuple[float, float], drafted: int, accepted: int, after: tuple[float, float]) -> None:
    assert update_threshold(before, drafted, accepted, 16.0, 0.9, 0.01) == pytest.approx(after, rel=1e-14)


@pytest.mark.parametrize("name", ["adaedl", "max_confidence"])
def test_both_decays_of_algorithm_1_are_settings(name: str) -> None:
    """3 of 6 accepted: 0.2 x 0.1 + 0.8 x 0.5 = 0.42 is below 0.9; then 0.4 + (1 - 0.7) x 0.01 = 0.403."""
    policy = make_policy(name, {"rate_decay": 0.2, "threshold_decay": 0.7})
    assert policy.update((0.4, 0.1), policy.params, 6, 3) == pytest.approx((0.403, 0.42), rel=1e-14)


def test_static_thresholds_never_move() -> None:
    for name in ("adaedl", "max_confidence"):
        policy = make_policy(name, {"dynamic": False, "lambda0": 0.4})
        assert policy.update((0.4, 0.0), policy.params, 5, 0) == (0.4, 0.0)


def test_adaedl_score_at_known_entropies() -> None:
    """gamma = 0.2: H = 0 scores 1, H = 1.25 scores 0.5, H = 5 scores 0, H = 20 scores -1."""
    keep, params = POLICIES["adaedl"].keep_drafting, make_policy("adaedl", {"gamma": 0.2}).params
    for entropy, score in ((0.0, 1.0), (1.25, 0.5), (5.0, 0.0), (20.0, -1.0)):
        step = Step(0.5, 0.5, entropy, 0.5, 0.5)
        assert keep((score - 1e-12, 0.0), params, step, 1, 0.5)[0]
        assert not keep((score + 1e-12, 0.0), params, step, 1, 0.5)[0]


def test_a_draft_always_holds_one_token_even_at_lambda_1() -> None:
    """The token whose test fails is kept, so a round that may draft drafts."""
    trace = build_trace(np.random.default_rng(0), np.ones((30, 4), dtype=bool), [30])
    policy = make_policy("adaedl", {"lambda0": 1.0, "dynamic": False, "max_draft_tokens": 4})
    log = replay(trace, policy, cost_table(trace, RampCost()), log=True).rounds
    assert log.drafted[:-1].tolist() == [1] * 14 and log.drafted[-1] in (0, 1)


# (num_assistant_tokens), drafted, accepted -> (num_assistant_tokens)
SCHEDULES = {
    "all accepted adds two": ("heuristic", 5, 5, 5, 7),
    "a rejection takes 1": ("heuristic", 5, 5, 4, 4),
    "a draft stopped early and all accepted adds two as well": ("heuristic_transient", 5, 2, 2, 7),
    "never below 1": ("heuristic_transient", 1, 1, 0, 1),
    "constant stays": ("constant", 5, 5, 5, 5),
}


@pytest.mark.parametrize(("schedule", "before", "drafted", "accepted", "after"), SCHEDULES.values(), ids=SCHEDULES)
def test_hugging_face_schedules(schedule: str, before: int, drafted: int, accepted: int, after: int) -> None:
    policy = make_policy("hugging_face", {"schedule": schedule})
    assert policy.update((float(before),), policy.params, drafted, accepted) == (float(after),)
    assert policy.carries_state == (schedule == "heuristic")


def test_a_carried_state_lives_on_and_another_starts_anew() -> None:
    """Everything is accepted, so the draft length grows by two a round, over sequences if it is carried."""
    trace = build_trace(np.random.default_rng(0), np.ones((60, 12), dtype=bool), [20, 20, 20])
    table = cost_table(trace, RampCost())
    settings = {"num_assistant_tokens": 1, "assistant_confidence_threshold": 0.0, "max_draft_tokens": 12}

    def first_drafts(schedule: str) -> list[int]:
        log = replay(trace, make_policy("hugging_face", {**settings, "schedule": schedule}), table, log=True).rounds
        return [int(log.drafted[log.sequence == s][0]) for s in range(3)]

    assert first_drafts("heuristic_transient") == [1, 1, 1]
    # Drafts of 1, 3, 5 and 7 tokens emit 2, 4, 6, 8 tokens of the first sequence's 20.
    assert first_drafts("heuristic") == [1, 9, 12]


def test_time_gain_multiplies_confidences_and_reads_its_ratio_from_the_costs() -> None:
    """0.8 x 0.5 = 0.4 holds against s_d / s_t = 0.4, times 0.9 does not; a second round starts afresh."""
    trace = build_trace(
        np.random.default_rng(0),
        np.zeros((2, 5), dtype=bool),
        [2],
        spare_budget=[9],
        ends_by_eos=[True],
        confidence=np.tile([0.8, 0.5, 0.9, 1.0, 1.0], (2, 1)),
    )
    table = cost_table(trace, ConstantCost(4e-3, 1e-2))
    policy = fit(POLICIES["time_gain"], {"max_draft_tokens": 5}, trace, table)
    assert policy.settings["cost_ratio"] == pytest.approx(0.4)
    exact = make_policy("time_gain", {"max_draft_tokens": 5, "cost_ratio": float(np.float32(0.8) * np.float64(0.5))})
    log = replay(trace, exact, table, log=True).rounds
    assert log.drafted.tolist() == [3, 3]
    assert fit(POLICIES["time_gain"], {"cost_ratio": 0.7}, trace, table).settings["cost_ratio"] == 0.7


def test_p_min_is_static_max_confidence() -> None:
    trace = small_trace()
    table = cost_table(trace, RampCost())
    p_min = replay(trace, make_policy("p_min", {"p_min": 0.3, "max_draft_tokens": DEPTH}), table, log=True)
    settings = {"lambda0": 0.3, "dynamic": False, "max_draft_tokens": DEPTH}
    max_confidence = replay(trace, make_policy("max_confidence", settings), table, log=True)
    assert p_min.rounds.rows() == max_confidence.rounds.rows()


def test_a_dropped_token_costs_its_draft_step_and_is_not_verified() -> None:
    trace, policy = traced(3), LlamaCpp(p_min=0.4, max_draft_tokens=DEPTH)
    table = cost_table(trace, RampCost())
    result = replay(trace, policy, table, log=True)
    assert [list(row[:5]) for row in result.rounds.rows()] == drive(policy, trace, 0)
    seconds, asked = np.zeros((trace.sequences, 4)), np.zeros(trace.sequences, np.int64)
    seen, before = set(), (-1, False)
    for s, t, drafted, accepted, verified, _ in result.rounds.rows():
        bucket = (int(trace.prompt_tokens[s]) + t - 1) >> table.bucket_bits
        dropped, limit = drafted - verified, min(DEPTH, int(trace.draft_limit[trace.offsets[s] + t]))
        asked[s] += drafted  # the last token too
        if drafted:
            behind = before == (s, True)
            seconds[s, 0] += table.draft_s[drafted, bucket] + behind * table.catch_up_s[bucket]
        seconds[s, 2] += table.verify_s[verified + 1, bucket]
        before = s, 0 < drafted == accepted
        seen.add((dropped, verified == 0, drafted == limit))
    assert seen >= {(1, False, False), (1, True, False), (1, False, True), (0, False, True)}
    seconds[:, 1] = asked * table.policy_step_s
    seconds[:, 3] = result.num_rounds * table.round_overhead_s
    np.testing.assert_allclose(result.seconds, seconds, rtol=1e-12)
    assert result.policy_steps.tolist() == asked.tolist()
    assert result.verified.sum() < result.drafted.sum()


def test_why_a_policy_does_not_belong_on_a_trace() -> None:
    trace = small_trace()
    assert unsupported_reason(trace, FixedK) is None
    assert "'score'" in str(unsupported_reason(trace, Coin)) and unsupported_reason(traced(), Coin) is None
