"""Continuous batching: requests, against lockstep, by hand, against queueing theory; and what is made of a run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.linear import LinearCost, LinearPass
from specsim.engines.as_engine import as_engine
from specsim.engines.conventions import CONVENTIONS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.tree.cartesian import Cartesian
from specsim.policy.tree.static import StaticTree
from specsim.policy.tree.vct import VCT
from specsim.serving.arrivals import Requests, recorded_requests, requests_of_trace
from specsim.serving.continuous import ServingRun, Step, run_server
from specsim.serving.draft_length import TurboSpec
from specsim.serving.drafts import Arm, drafts_of
from specsim.serving.latency import summarise_run
from specsim.serving.lockstep import lockstep
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.reference import small_trace
from tests.support.serving_costs import COST
from tests.support.tree_traces import tree_trace


def served(trace: Trace, arm: Arm, requests: Requests, **options: Any) -> ServingRun:
    return run_server(drafts_of(trace, arm, served=True), COST, requests, **options)


def in_order(trace: Trace, order: list[int], arrival_s: list[float] | None = None) -> Requests:
    """Requests as these sequences."""
    which = np.array(order)
    times = np.zeros(len(order)) if arrival_s is None else np.array(arrival_s)
    return Requests(times, trace.prompt_tokens[which], np.diff(trace.offsets)[which], which)


ARMS = [FixedK(k=4), None, VCT(width=2, depth=3), Cartesian(s1=3, s2=2, s3=1), SpaceK(k=3)]


BEHIND_THE_PROMPT = dataclasses.replace(CONVENTIONS["specsim"], first_token="prefill")


@pytest.mark.parametrize("arm", ARMS, ids=["chain", "plain", "vct", "cartesian", "space"])
@pytest.mark.parametrize("options", [{"slots": 3}, {"slots": 8, "users": 4}, {"slots": 8, "kv_tokens": 120}])
def test_load_does_not_change_what_a_policy_drafts(options: dict[str, Any], arm: Arm) -> None:
    trace = tree_trace(4, sequences=5, tokens=25) if isinstance(arm, StaticTree) else small_trace(4)
    run = served(trace, arm, in_order(trace, [0, 1, 2, 3, 4], [0.0, 0.01, 0.02, 0.3, 0.3]), **options)
    alone = lockstep(drafts_of(as_engine(trace, BEHIND_THE_PROMPT, max_output_tokens=99).trace, arm), COST, 1).rounds
    for request in range(5):
        mine, own = run.rounds["request"] == request, alone.sequence == request
        assert run.rounds["drafted"][mine].tolist() == alone.drafted[own].tolist()
        assert run.rounds["accepted"][mine].tolist() == alone.accepted[own].tolist()
    assert run.steps["output_tokens"].sum() == len(trace.token) == alone.emitted.sum() + 5
    assert (run.submitted_s <= run.started_s).all() and (run.started_s < run.first_token_s).all()
    assert (run.first_token_s <= run.finished_s).all()


def test_one_slot_is_a_queue_with_fixed_service_times() -> None:
    trace = generate(IID(0.5), sequences=1, output_tokens=1, depth=1, prompt_tokens=1)
    requests = requests_of_trace(trace, 2500, rate=40.0, seed=3)
    run = served(trace, None, requests, slots=1)
    service_s = COST.target.fixed_s + COST.target.token_s + COST.step_s  # the prompt's pass puts the only token out
    waited_s = run.started_s - run.submitted_s
    expected = [0.0]  # Lindley: a request waits for what the request before has left
    for gap_s in np.diff(requests.arrival_s):
        expected.append(max(0.0, expected[-1] + service_s - gap_s))
    assert waited_s == pytest.approx(expected, abs=1e-9)
    load = 40.0 * service_s
    formula_s = load * service_s / (2 * (1 - load))  # Pollaczek-Khinchine, M/D/1
    means_s = waited_s.reshape(25, 100).mean(axis=1)  # waits hang together, these hardly
    error_s = means_s.std(ddof=1) / 5
    assert error_s < 0.1 * formula_s and abs(waited_s.mean() - formula_s) < 2.8 * error_s  # 99 % of Student's t
    assert summarise_run(run).tokens_per_s == pytest.approx(40.0, rel=0.05)


def test_memory_is_held_from_admission_to_the_end_in_order() -> None:
    trace = generate(IID(0.7), sequences=4, output_tokens=[30, 30, 2, 30], depth=4, prompt_tokens=10)
    requests = in_order(trace, [0, 1, 2, 3])
    run = served(trace, FixedK(k=3), requests, slots=9, kv_tokens=80)
    held = requests.prompt_tokens + requests.output_tokens  # 40, 40, 12, 40
    # The third would fit when the second is over, and waits for it although it is small.
    assert run.started_s[:2].tolist() == [0, 0]
    assert run.started_s[2] == min(run.finished_s[:2])
    for moment in run.started_s:
        inside = (run.started_s <= moment) & (moment < run.finished_s)
        assert held[inside].sum() <= 80
    assert (np.diff(run.started_s) >= 0).all()


def test_a_request_may_be_longer_or_shorter_than_the_text_it_drafts_as() -> None:
    trace = generate(IID(0.8), sequences=2, output_tokens=20, depth=4, seed=3)
    for arm in (FixedK(k=4), TurboSpec(COST, 4), None):
        requests = Requests(np.zeros(2), np.array([9, 9]), np.array([57, 7]), np.array([0, 1]))
        run = served(trace, arm, requests, slots=2)
        assert run.steps["output_tokens"].sum() == 64
        emitted = run.steps["output_tokens"] - run.steps["prefill_output"]
        assert (run.steps["drafted"] + run.steps["sequences"] >= emitted).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 30), st.sampled_from([FixedK(k=1), FixedK(k=3), None]))
def test_more_slots_never_lower_tokens_per_second_in_a_closed_loop(slots: int, more: int, count: int, arm: Arm) -> None:
    trace = generate(IID(1.0), sequences=1, output_tokens=9, depth=3, prompt_tokens=1)
    requests = requests_of_trace(trace, count, seed=0)

    def seconds(places: int) -> float:
        return float(served(trace, arm, requests, slots=places, users=20).finished_s.max())

    assert seconds(slots + more) <= seconds(slots) * (1 + 1e-12)


def test_a_seed_decides_all() -> None:
    trace = generate(IID(0.7), sequences=20, output_tokens=30, depth=4)

    def summary(seed: int) -> dict[str, Any]:
        requests = requests_of_trace(trace, 100, rate=20.0, seed=seed)
        return summarise_run(served(trace, TurboSpec(COST, 4), requests, slots=4), tpot_bound_s=0.02).as_dict()

    assert summary(1) == summary(1) != summary(2)


@pytest.mark.slow
def test_waits_for_several_slots_are_erlangs() -> None:
    """Geometric lengths in steps of equal seconds are nearly exponential service; M/M/c: Erlang's C formula."""
    rng = np.random.default_rng(7)
    lengths = rng.geometric(1 / 40, 6000)
    trace = generate(IID(0.5), sequences=6000, output_tokens=lengths, depth=1, prompt_tokens=1)
    step_s, slots, load = 0.01, 3, 0.8
    cost = LinearCost(LinearPass(step_s), LinearPass(1e-9))
    service_s = step_s * lengths.mean()
    rate = load * slots / service_s
    requests = Requests(
        np.cumsum(rng.exponential(1 / rate, 6000)), trace.prompt_tokens, trace.output_tokens, np.arange(6000)
    )
    run = run_server(drafts_of(trace, None), cost, requests, slots=slots)
    waited_s = (run.started_s - run.submitted_s)[600:]
    offered = load * slots
    terms = [offered**n / math.factorial(n) for n in range(slots)]
    full = offered**slots / math.factorial(slots) / (1 - load)
    expected_s = full / (sum(terms) + full) * service_s / (slots * (1 - load))
    means_s = waited_s.reshape(20, 270).mean(axis=1)
    error_s = means_s.std(ddof=1) / math.sqrt(20)
    assert error_s < 0.15 * expected_s
    # A request that finds a free slot waits for the running step to end, half of one on average.
    assert abs(waited_s.mean() - expected_s) < 2.9 * error_s + step_s / 2


@pytest.mark.parametrize("options", [{}, {"step_tokens": 16}, {"kv_tokens": 400, "block_tokens": 16}])
def test_requests_in_the_server_are_rate_times_time(options: dict[str, Any]) -> None:
    """Little's law, over the whole run."""
    trace = generate(IID(0.7), sequences=40, output_tokens=20, depth=3, seed=2, prompt_tokens=30)
    requests = requests_of_trace(trace, 120, rate=12.0, seed=5)
    run = served(trace, FixedK(k=2), requests, slots=8, **options)
    moments = np.sort(np.concatenate([run.submitted_s, run.finished_s]))
    inside = [((run.submitted_s <= at) & (at < run.finished_s)).sum() for at in moments[:-1]]
    area = float((np.array(inside) * np.diff(moments)).sum())
    assert area == pytest.approx(float((run.finished_s - run.submitted_s).sum()), rel=1e-9)


def test_the_latest_request_gives_its_blocks_back_by_hand() -> None:
    # Six blocks of 4 tokens; each request has a prompt of 5 and 9 output tokens, one a step. Admission takes 2 blocks
    # of each. When all need a third, none is free, and the request admitted last gives its two back.
    trace = generate(IID(0.0), sequences=3, output_tokens=9, depth=1, prompt_tokens=5)
    run = served(trace, None, in_order(trace, [0, 1, 2]), slots=3, kv_tokens=24, block_tokens=4)
    whole = served(trace, None, in_order(trace, [0, 1, 2]), slots=3, kv_tokens=28)
    assert run.preemptions > 0 and whole.preemptions == 0
    assert np.diff(run.finished_s[[0, 1, 2]]).min() >= 0  # the first admitted is never preempted
    assert run.steps["output_tokens"].sum() == 27 == whole.steps["output_tokens"].sum()
    held = []
    for step in range(len(run.steps["seconds"])):
        mine = run.rounds["request"][run.rounds["step"] == step]
        done = [((run.rounds["request"] == r) & (run.rounds["step"] <= step)).sum() for r in mine]
        held.append(sum(-(-(4 + n) // 4) for n in done))  # the last token emitted is not in the cache yet
    assert max(held) == 6
    # Blocks admit all three at once, where whole lengths leave room for two.
    assert (run.started_s == 0).sum() == 3 and (whole.started_s == 0).sum() == 2


def made_run() -> ServingRun:
    """Four requests of 3 tokens, asked at 0, 1, 2 and 4 s; steps of a second, each with a token of each."""
    first, finished = np.array([1.0, 2.0, 4.0, 5.0]), np.array([3.0, 4.0, 8.0, 7.0])
    requests = Requests(np.array([0.0, 1.0, 2.0, 4.0]), np.full(4, 5), np.full(4, 3), np.arange(4))
    steps = [
        Step(end, 1.0, size, 0, 3 * size, 9, size, 0, 2 * size, 2 * size, 0)
        for end, size in enumerate([1, 2, 2, 2, 2, 1, 1, 1], start=1)
    ]
    columns = {
        name: np.array(column, dtype=float) for name, column in zip(Step._fields, zip(*steps, strict=True), strict=True)
    }
    return ServingRun("made", requests, requests.arrival_s, requests.arrival_s, first, finished, columns, {})


def test_rates_and_latencies_by_hand() -> None:
    whole = summarise_run(made_run(), warm_up=0, tpot_bound_s=1.5, ttft_bound_s=1.5)
    # From 0 to the last question at 4 s: 1 + 2 + 2 + 2 tokens; the first two requests finish.
    assert whole.tokens_per_s == 7 / 4 and whole.requests_per_s == 2 / 4 and whole.mean_batch == 7 / 4
    assert whole.mean_drafted == 2 and whole.tokens_per_round == 1
    # TPOT: 2/2, 2/2, 4/2, 2/2; TTFT: 1, 1, 2, 1.
    assert (whole.tpot_s.mean, whole.tpot_s.p50) == (1.25, 1.0) and whole.ttft_s.p99 == pytest.approx(1.97)
    assert whole.within == 0.75 and whole.goodput_per_s == 0.75 * 0.5 and whole.measured == 4
    warm = summarise_run(made_run(), warm_up=0.25)
    # The first request to finish does at 3 s; from then on, 2 tokens in a second, and the last request.
    assert warm.seconds == 1 and warm.tokens_per_s == 2 and warm.measured == 1 and warm.goodput_per_s is None
    assert summarise_run(made_run(), warm_up=0, tpot_bound_s=0.5).goodput_per_s == 0
    refusal(lambda: summarise_run(made_run(), warm_up=0.5), "too few to reach a steady state", "more requests")
    refusal(lambda: summarise_run(made_run(), warm_up=1.0), "warm_up=1.0")


def test_what_can_never_be_served_is_refused() -> None:
    trace = small_trace(1)
    requests = requests_of_trace(trace, 3, seed=0)
    refusal(lambda: served(trace, None, requests, slots=0), "slots=0")
    refusal(lambda: served(trace, None, requests, slots=1, users=0), "users=0")
    refusal(lambda: served(trace, None, requests, slots=1, step_tokens=0), "step_tokens=0", "at least 1")
    refusal(lambda: served(trace, None, requests, slots=1, kv_tokens=20), "never fits", "20")


TRACE = generate(IID(0.5), sequences=3, output_tokens=[4, 5, 6], depth=2, prompt_tokens=7)
# As the public files begin; the times of arrival, in seconds from the first, are 0, 1.25 and 3.
FORMATS = {
    "azure 2023.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.9305900,396,109\n2023-11-16 18:15:49.6805900,879,55\n",
    "azure 2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,374,44\n"
    "2024-05-10 00:00:01.259930+00:00,396,109\n2024-05-10 00:00:03.009930+00:00,879,55\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,374,44,418,Conversation log\n6.25,GPT-4,396,109,505,API log\n7,ChatGPT,9,0,9,API log\n"
    "8,ChatGPT,879,55,934,Conversation log\n",
    "mooncake.jsonl": '{"timestamp": 27482, "input_length": 374, "output_length": 44, "hash_ids": [46, 47]}\n'
    '{"timestamp": 28732, "input_length": 396, "output_length": 109, "hash_ids": [46]}\n'
    '{"timestamp": 30482, "input_length": 879, "output_length": 55, "hash_ids": []}\n',
    "bailian.jsonl": '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 374, '
    '"output_length": 44, "type": "text", "turn": 1, "hash_ids": [1089]}\n\n'
    '{"chat_id": 160, "timestamp": 62.25, "input_length": 396, "output_length": 109}\n'
    '{"chat_id": 161, "timestamp": 64, "input_length": 879, "output_length": 55}\n',
}


@pytest.mark.parametrize("name", FORMATS)
def test_public_traces_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FORMATS[name])
    requests = recorded_requests(path, TRACE)
    assert requests.arrival_s == pytest.approx([0, 1.25, 3], abs=1e-9)
    assert requests.prompt_tokens.tolist() == [374, 396, 879] and requests.output_tokens.tolist() == [44, 109, 55]
    assert requests.left_out == (1 if "burst" in name else 0)
    assert sorted(requests.sequence.tolist()) == [0, 1, 2]
    assert len(recorded_requests(path, TRACE, limit=2)) == 2


def test_requests_are_taken_in_the_order_of_their_times(tmp_path: Path) -> None:
    path = tmp_path / "shuffled.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n9,1,1\n4,2,2\n4,3,3\n")
    requests = recorded_requests(path, TRACE)
    assert requests.arrival_s.tolist() == [0, 0, 5] and requests.prompt_tokens.tolist() == [2, 3, 1]


BAD = {
    "other columns": ("a.csv", "time,tokens\n1,2\n", "columns time, tokens"),
    "no number": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,3\n2,many,3\n", "request 2 has no valid pro"),
    "negative": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,-3\n", "no valid output"),
    "half a token": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,0.5\n", "no valid output (0.5)"),
    "beyond numbers": ("a.csv", f"Timestamp,Request tokens,Response tokens\n1,{'9' * 400},3\n", "no valid prompt"),
    "a number as date": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n17,2,3\n", "TIMESTAMP is no date"),
    "no date": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "TIMESTAMP is no date"),
    "no time": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n,2,3\n", "no valid time"),
    "no rows": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    "more cells": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,3,4\n", "more cells than its first line"),
    "more cells below": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,3\n1,2,3,4\n", "not a CSV file"),
    "empty": ("a.csv", "", "not a CSV file"),
    "failed alone": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,0\n", "no request with output"),
    "no JSON": ("a.jsonl", "{}\n", "line 1", "required field `timestamp`"),
    "a word": ("a.jsonl", '{"timestamp": 1, "input_length": "x", "output_length": 1}', "input_length"),
    "no lines": ("a.jsonl", "\n", "no request"),
    "too long": ("a.jsonl", '{"timestamp": 1, "input_length": 9999999999, "output_length": 1}', "no valid prompt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    name, text, *message = BAD[case]
    path = tmp_path / name
    path.write_text(text)
    refusal(lambda: recorded_requests(path, TRACE), name, *message)


def test_a_missing_file_is_refused_with_what_there_could_be(tmp_path: Path) -> None:
    refusal(lambda: recorded_requests(tmp_path / "no.csv", TRACE), "does not exist", "poisson:RATE", "Azure")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x01")
    refusal(lambda: recorded_requests(tmp_path / "bytes.csv", TRACE), "bytes.csv")


def test_drawn_arrivals_are_poisson() -> None:
    requests = requests_of_trace(TRACE, 6000, rate=8.0, seed=5)
    gaps_s = np.diff(requests.arrival_s)
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.05) and gaps_s.std() == pytest.approx(1 / 8, rel=0.05)
    assert np.bincount(requests.sequence).tolist() == [2000] * 3
    assert set(requests.output_tokens.tolist()) == {4, 5, 6} and set(requests.prompt_tokens.tolist()) == {7}
    assert requests_of_trace(TRACE, 5, seed=0).arrival_s.tolist() == [0] * 5
    refusal(lambda: requests_of_trace(TRACE, 5, rate=0.0, seed=0), "positive rate")
    refusal(lambda: requests_of_trace(TRACE, 0, seed=0), "0 requests")
