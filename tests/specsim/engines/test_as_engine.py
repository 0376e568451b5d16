"""Traces as engines run them: against engines written out plainly, what engines counted, and how they define it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import specsim
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.acceptance.sources import Rounds, verified_by_depth
from specsim.cost.model import ConstantCost
from specsim.engines.as_engine import as_engine, counters_of, rounds_of
from specsim.engines.conventions import CONVENTIONS, Conventions, find_conventions
from specsim.engines.definitions import (
    DEFINITIONS,
    LENGTH,
    POSITIONS,
    QUANTITIES,
    RATE,
    TPOT,
    Totals,
    engine_counts,
    find_definitions,
)
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.p_min import LlamaCpp
from specsim.policy.tree.eagle2 import Eagle2
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.commands import call, json_of

COST = ConstantCost(0.001, 0.010)
# Of the lab's pair, greedy: by engine, K and prompt, tokens drafted and accepted in each round that it counted.
COUNTED = json.loads((Path(__file__).parent / "rounds.json").read_text())


def plain_rounds(
    trace: Trace, k: npt.ArrayLike, limit: int, conventions: Conventions, output: int | None = None
) -> list[list[tuple[int, int, int]]]:
    """(t, drafted, accepted) of every sequence by an engine with these conventions, written out.

    k : of every round, or by the trace's row at which it starts
    output : tokens before which the text ends, where the trace goes on
    """
    ks = np.broadcast_to(k, len(trace.token)).tolist()
    by_sequence = []
    for begin, length in zip(trace.offsets.tolist(), trace.output_tokens.tolist(), strict=False):
        end = min(length, limit, output or limit)
        t = 1 if conventions.first_token == "prefill" else 0
        rounds = []
        while t < end:
            k = ks[begin + t]
            left = limit - t
            rule = conventions.last_draft
            drafted = {"K": k, "min(K, remaining - 1)": min(k, left - 1), "min(K, remaining)": min(k, left)}[rule]
            accepted = min(drafted, int(trace.match_len[begin + t]))
            if rule == "K" and not conventions.counts_past_end:
                drafted, accepted = (drafted if left > 1 else 0), min(accepted, left - 1)
            following = t + accepted + 1
            if t + accepted == length and conventions.accepts_end != "always":  # an end of text, and nothing after it
                accepted -= conventions.accepts_end == "never" or drafted > accepted
            if drafted or conventions.counts_empty:
                rounds.append((t, drafted, accepted))
            t = following
        by_sequence.append(rounds)
    return by_sequence


def replayed_rounds(
    trace: Trace, policy: Policy, limit: int, conventions: Conventions
) -> list[list[tuple[int, int, int]]]:
    played = as_engine(trace, conventions, max_output_tokens=limit).trace
    run = specsim.replay(played, COST, policy)
    rounds = rounds_of(run.rounds, played, conventions)
    rows = np.stack([rounds.t, rounds.drafted, rounds.accepted], axis=1)
    return [[tuple(row) for row in rows[rounds.sequence_id == s].tolist()] for s in range(trace.sequences)]


@pytest.mark.parametrize("engine", CONVENTIONS)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("limit", [1, 2, 9, 24])
def test_a_replay_is_the_engine_written_out(engine: str, k: int, limit: int) -> None:
    trace = generate(IID(0.7), sequences=30, output_tokens=33, depth=8, seed=k)
    conventions = find_conventions(engine)
    assert replayed_rounds(trace, FixedK(k), limit, conventions) == plain_rounds(trace, k, limit, conventions)


@pytest.mark.parametrize("k", [1, 3, 8, 10])
@pytest.mark.parametrize("limit", [1, 2, 9, 24])
def test_lookup_of_transformers_drafts_more_than_there_is_room_for(k: int, limit: int) -> None:
    """It accepts up to the limit, and drafts nothing for a last token."""
    trace = generate(IID(0.7), sequences=30, output_tokens=33, depth=10, seed=k)
    trace = dataclasses.replace(trace, meta=trace.meta | {"drafter_kind": "lookup"})
    conventions = find_conventions("transformers")
    assert conventions.last_draft == "min(K, remaining - 1)"
    expected = plain_rounds(trace, k, limit, dataclasses.replace(conventions, last_draft="K"))
    assert replayed_rounds(trace, FixedK(k), limit, conventions) == expected


@pytest.mark.parametrize("engine", CONVENTIONS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_text_that_ends_before_the_limit_ends_as_the_engine_has_it(engine: str, k: int) -> None:
    """Its last token is an end of text, which the drafter proposes here and there."""
    trace = generate(IID(0.7), sequences=30, output_tokens=20, depth=8, seed=k)
    trace = dataclasses.replace(trace, budget_tokens=trace.budget_tokens + 10, meta=trace.meta | {"eos_token_id": None})
    conventions = find_conventions(engine)
    expected = plain_rounds(trace, k, 30, conventions)
    assert replayed_rounds(trace, FixedK(k), 30, conventions) == expected
    accepted_ends = [row for sequence in expected for row in sequence if row[0] + row[2] == 20]
    if conventions.accepts_end == "last":
        assert all(drafted == accepted for _, drafted, accepted in accepted_ends)
    else:
        assert bool(accepted_ends) == (conventions.accepts_end == "always")
    draft_token = trace.draft_token.copy()
    draft_token[:, 0] = 99  # an end of text, as the drafter has it, though the target goes on
    ends = dataclasses.replace(trace, draft_token=draft_token, meta=trace.meta | {"eos_token_id": [99]})
    drafted = {row[1] for sequence in replayed_rounds(ends, FixedK(k), 30, conventions) for row in sequence}
    assert (max(drafted) == k) if conventions.drafts_past_end else (max(drafted) == 1)


@pytest.mark.parametrize("engine", CONVENTIONS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_recording_that_goes_on_behind_an_end_of_text_tells_what_is_accepted_there(engine: str, k: int) -> None:
    """Of engines that do not count it, nothing."""
    trace = generate(IID(0.8), sequences=30, output_tokens=40, depth=8, seed=k)
    token, draft_token = np.ones_like(trace.token), np.ones_like(trace.draft_token)
    token[trace.offsets[:-1] + 19] = token[trace.offsets[:-1] + 25] = 99  # a second end of text, after the output
    trace = dataclasses.replace(trace, token=token, draft_token=draft_token, meta=trace.meta | {"eos_token_id": [99]})
    conventions = find_conventions(engine)
    clipped = dataclasses.replace(trace.shortened(20), budget_tokens=trace.budget_tokens)
    clips = not conventions.counts_past_end
    expected = plain_rounds(clipped if clips else trace, k, 30, conventions, 20)
    assert replayed_rounds(trace, FixedK(k), 30, conventions) == expected
    assert any(t + accepted > 20 for sequence in expected for t, _, accepted in sequence) == (not clips and k > 1)
    assert as_engine(trace, conventions, max_output_tokens=30).cut_off == 0
    assert as_engine(clipped, conventions, max_output_tokens=30).cut_off == (0 if clips else 30)


@pytest.mark.parametrize("engine", CONVENTIONS)
def test_engines_do_not_count_dropped_tokens(engine: str) -> None:
    """By position, the third token is refused, the first, or none: drafts of 2, 0 or 4 tokens."""
    trace = generate(IID(0.7), sequences=30, output_tokens=33, depth=8)
    confidence = np.ones(trace.prob.shape, dtype=np.float32)
    confidence[0::3, 2] = confidence[1::3, 0] = 0.1
    trace = dataclasses.replace(trace, top10_confidence=confidence)
    conventions, limit = find_conventions(engine), 24
    longest = np.take([2, 0, 4], np.arange(len(confidence)) % 3)
    expected = plain_rounds(trace, longest, limit, conventions)
    assert {drafted for sequence in expected for _, drafted, _ in sequence} >= {2, 4}
    assert replayed_rounds(trace, LlamaCpp(0.5, 4), limit, conventions) == expected


def test_only_engines_that_do_not_clip_accept_beyond_the_limit() -> None:
    trace = generate(IID(0.9), sequences=50, output_tokens=40, depth=8)
    beyond = {}
    for engine, conventions in CONVENTIONS.items():
        rounds = replayed_rounds(trace, FixedK(8), 32, conventions)
        beyond[engine] = sum(t + accepted > 32 for sequence in rounds for t, _, accepted in sequence)
    assert beyond["vllm"] > 10
    assert {engine for engine, rounds in beyond.items() if rounds} == {"vllm"}


def test_what_the_recording_does_not_reach_is_counted() -> None:
    trace = generate(IID(0.8), sequences=6, output_tokens=30, depth=8)
    assert as_engine(trace, CONVENTIONS["vllm"]).cut_off == 6
    assert as_engine(trace, CONVENTIONS["vllm"], max_output_tokens=23).cut_off == 6
    assert as_engine(trace, CONVENTIONS["vllm"], max_output_tokens=22).cut_off == 0
    assert as_engine(trace, CONVENTIONS["llamacpp"]).cut_off == 0
    ended = dataclasses.replace(trace, budget_tokens=trace.budget_tokens + 20)  # vLLM accepts behind an end of text too
    assert as_engine(ended, CONVENTIONS["vllm"], max_output_tokens=40).cut_off == 6
    assert as_engine(ended, CONVENTIONS["llamacpp"], max_output_tokens=40).cut_off == 0


def test_what_was_output_and_what_it_costs_without_drafts_is_the_same_but_for_the_first_token() -> None:
    trace = generate(IID(0.8), sequences=6, output_tokens=30, depth=8)
    whole = PricedTrace(trace, COST)
    run = PricedTrace(as_engine(trace, CONVENTIONS["llamacpp"]).trace, COST)
    assert run.trace.output_tokens.tolist() == (trace.output_tokens - 1).tolist()
    assert run.trace.prompt_tokens.tolist() == (trace.prompt_tokens + 1).tolist()
    assert whole.baseline_s - run.baseline_s == pytest.approx(np.full(6, 0.010))


def test_own_conventions_leave_a_trace_as_it_is() -> None:
    trace = generate(IID(0.8), sequences=6, output_tokens=30, depth=8)
    same = as_engine(trace, CONVENTIONS["specsim"]).trace
    for name in ("offsets", "token", "match_len", "budget_tokens", "prompt_tokens", "draft_limit"):
        assert np.array_equal(getattr(same, name), getattr(trace, name)), name


@pytest.mark.parametrize("engine", COUNTED)
def test_counters_are_those_of_the_rounds(engine: str) -> None:
    for k, sequences in COUNTED[engine].items():
        drafted, accepted = (
            np.array([int(digit) for sequence in sequences for digit in sequence[column]]) for column in (0, 1)
        )
        counters = counters_of(Rounds(drafted, accepted))
        assert counters.drafted.sum() == drafted.sum() and counters.accepted.sum() == accepted.sum()
        assert len(counters.drafted) == int(k)
        ours = verified_by_depth(counters)
        assert ours[0].tolist() == verified_by_depth(Rounds(drafted, accepted))[0].tolist()


def test_an_engine_counts_no_trees() -> None:
    trace = generate(IID(0.8), sequences=2, output_tokens=10, depth=8)
    with pytest.raises(InputError, match="policy eagle2 drafts trees, which no engine's counters cover"):
        engine_counts(PricedTrace(trace, COST), Eagle2(), CONVENTIONS["vllm"])


def test_counts_of_a_replay() -> None:
    run = as_engine(generate(IID(1.0), sequences=3, output_tokens=30, depth=4), CONVENTIONS["llamacpp"])
    counts = engine_counts(PricedTrace(run.trace, COST), FixedK(4), CONVENTIONS["llamacpp"])
    # 29 tokens by rounds: five of 5, then 4 tokens, of which 3 are drafted.
    assert counts.num_drafts == 18 and counts.num_draft_tokens == counts.num_accepted_tokens == 3 * 23
    assert counts.accepted_per_position == [18, 18, 18, 15]
    assert counts.printed["draft acceptance"] == 1.0
    assert counts.printed["mean len, #mean acc len"] == pytest.approx(1 + 23 / 6)


def test_a_limit_below_one_and_an_unknown_engine_are_refused() -> None:
    trace = generate(IID(0.8), sequences=2, output_tokens=10, depth=8)
    refusal(lambda: as_engine(trace, CONVENTIONS["vllm"], max_output_tokens=0), "max_output_tokens=0; give at least 1")
    refusal(lambda: find_conventions("tgi"), "unknown engine 'tgi'; choose one of specsim, vllm")


def totals_of(engine: str, k: str, output_tokens: int = 12 * 96) -> Totals:
    """What a recorded run of 12 prompts of 96 tokens comes to."""
    columns = ([int(digit) for sequence in COUNTED[engine][k] for digit in sequence[column]] for column in (0, 1))
    return Totals.of(Rounds(*(np.array(column) for column in columns)), output_tokens)


def value(engine: str, quantity: str, totals: Totals) -> object:
    (number,) = find_definitions(quantity, engine)
    return number.value(totals)


def test_what_llamacpp_printed() -> None:
    """Of its statistics at K = 3: 475 drafts of 1,414 tokens, 659 accepted, 308, 207 and 144 by position."""
    totals = totals_of("llamacpp", "3")
    assert (totals.rounds, totals.drafted, totals.accepted) == (475, 1414, 659)
    assert totals.by_depth.accepted.tolist() == [308, 207, 144]
    assert value("llamacpp", LENGTH, totals) == pytest.approx(1 + 659 / 475)
    assert value("llamacpp", RATE, totals) == pytest.approx(659 / 1414)
    assert value("llamacpp", POSITIONS, totals) == pytest.approx([308 / 475, 207 / 475, 144 / 475])


@pytest.mark.parametrize(("k", "drafts", "drafted", "accepted"), [("3", 481, 1443, 674), ("5", 417, 2085, 750)])
def test_what_vllm_printed(k: str, drafts: int, drafted: int, accepted: int) -> None:
    totals = totals_of("vllm", k)
    assert (totals.rounds, totals.drafted, totals.accepted) == (drafts, drafted, accepted)
    assert value("vllm", LENGTH, totals) == pytest.approx(1 + accepted / drafts)
    assert value("vllm", RATE, totals) == pytest.approx(accepted / drafted)


def test_one_run_by_every_definition() -> None:
    """A request of three rounds by hand: 2 of 2, 0 of 2 and 1 of 1 accepted; with the prompt's token 7 tokens.

    4 drafts were evaluated: not the second of the second round. The first token came after 1 s, the last after 4.
    """
    totals = Totals.of(Rounds(np.array([2, 2, 1]), np.array([2, 0, 1]), sequence_id=np.zeros(3, np.int64)), 7)
    totals = dataclasses.replace(totals, first_s=1.0, total_s=4.0)
    expected: dict[tuple[str, str], object] = {
        ("specsim", LENGTH): 7 / 3,
        ("specsim", RATE): 3 / 5,
        ("specsim", POSITIONS): [
            2 / 3,
            3 / 4,
        ],  # counters: of 2 with an accepted token, 2 / 3 draft a second
        ("vllm", LENGTH): 2.0,
        ("vllm", RATE): 3 / 5,
        ("vllm", POSITIONS): [2 / 3, 1 / 3],
        ("llamacpp", LENGTH): 2.0,
        ("llamacpp", RATE): 3 / 5,
        ("llamacpp", POSITIONS): [2 / 3, 1 / 3],
        ("sglang", LENGTH): 7 / 3,
        ("sglang", RATE): 3 / 5,
        ("tensorrt-llm", LENGTH): 2.0,
        ("tensorrt-llm", POSITIONS): [2 / 3, 1 / 2],
        ("lmdeploy", LENGTH): 2.0,
        ("lmdeploy", RATE): 3 / 5,
        ("lmdeploy", POSITIONS): [2 / 3, 1 / 3],
        ("aiperf", LENGTH): 2.0,
        ("aiperf", RATE): 60,
        ("transformers", LENGTH): 1.0,
        ("openvino", RATE): 2 / 4,
        ("onnxruntime-genai", LENGTH): 7 / 3,
        ("onnxruntime-genai", RATE): 3 / 4,
        **{(engine, TPOT): 3 / 6 for engine in ("specsim", "vllm", "llamacpp", "openvino", "aiperf")},
        ("guidellm", TPOT): 4 / 7,
        ("mlx", TPOT): 3 / 7,
    }
    assert {(number.engine, number.quantity) for number in DEFINITIONS} == set(expected)
    for number in DEFINITIONS:
        assert number.value(totals) == pytest.approx(expected[number.engine, number.quantity]), number.printed


def test_explain_puts_an_engine_beside_specsim() -> None:
    rows = json_of(call("specsim", "explain", "acceptance-rate", "--engine", "sglang", "--json"))["acceptance-rate"]
    assert [row["engine"] for row in rows] == ["specsim", "sglang"]
    assert "pull request 13212" in rows[1]["note"]
    rounds = json_of(call("specsim", "explain", "rounds", "--engine", "vllm", "--json"))["rounds"]
    assert rounds[0]["first_token"] == "prefill" and rounds[0]["last_draft"] == "K"


@pytest.mark.parametrize("quantity", [*QUANTITIES, "rounds"])
def test_explain_says_it_in_words(quantity: str) -> None:
    text = call("specsim", "explain", quantity).out
    assert "vllm" in text and "specsim" in text


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="trtllm prints no acceptance-rate; it prints acceptance-length"):
        find_definitions("acceptance-rate", "trtllm")
    with pytest.raises(InputError, match="transformers prints no position-rate; it prints acceptance-length"):
        find_definitions(POSITIONS, "transformers")
    refusal(lambda: find_definitions(LENGTH, "Dynamo"), "Dynamo prints its engine's numbers; name that engine: vllm")
    refusal(
        lambda: find_definitions("tau"),
        "unknown quantity 'tau'; choose one of acceptance-length, acceptance-rate, position-rate, tpot, rounds, accept",
    )
