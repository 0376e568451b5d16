"""What a server decides under a schedule of K by batch, against vLLM: every request's rounds, with the K of each.

vLLM 0.32 decoded 12 prompts of the lab's pair, 96 tokens each, greedily, with 4 slots and K = 5 up to 2 sequences, 2
beyond. Its first request was there a step before the others.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.linear import LinearCost, LinearPass
from specsim.engines.as_engine import as_engine
from specsim.engines.conventions import CONVENTIONS
from specsim.serving.arrivals import Requests
from specsim.serving.continuous import ServingRun, run_server
from specsim.serving.draft_length import Running, ScheduledK, TurboSpec
from specsim.serving.drafts import drafts_of
from specsim.serving.presets import find_server
from specsim.trace.trace import Trace

# By request, a digit each: tokens drafted and accepted in each round as vLLM counted them, and, of the lab's recording,
# how many of 5 drafted tokens would be accepted at each position.
COUNTED = json.loads((Path(__file__).parent / "vllm_schedule.json").read_text())
SLOTS, SCHEDULE, TOKENS = 4, ScheduledK({1: 5, 3: 2}), 96
VLLM = dataclasses.replace(CONVENTIONS["vllm"], first_token="round")  # the server itself starts behind the first token
COST = LinearCost(LinearPass(0.01, 3e-4, 2e-6), LinearPass(0.002, 1e-4, 5e-7), step_s=0.001)


def as_vllm(texts: list[str], max_output_tokens: int | None = None) -> tuple[Trace, int]:
    """A recording in which so many of 5 drafted tokens would be accepted, as `as_engine` gives it."""
    match_len = np.array([[int(digit) for digit in text] for text in texts])
    sequences, tokens = match_len.shape
    drawn = generate(IID(0.5), sequences=sequences, output_tokens=tokens, depth=5, prompt_tokens=64)
    recorded = dataclasses.replace(drawn, match_len=match_len.ravel().astype(np.uint8))
    return as_engine(recorded, VLLM, max_output_tokens=max_output_tokens or tokens)


def served(rule: Any, *, drafts_ahead: bool = True) -> ServingRun:
    trace, beyond = as_vllm(COUNTED["match_len"], TOKENS)
    assert beyond == 0
    order = np.arange(trace.sequences)
    requests = Requests(np.where(order == 0, 0.0, 1e-6), trace.prompt_tokens, trace.output_tokens, order)
    server = dataclasses.replace(find_server("vllm"), drafts_ahead=drafts_ahead)
    return run_server(drafts_of(trace, rule, served=True), COST, requests, slots=SLOTS, server=server)


LOADS = json.loads((Path(__file__).parent / "vllm_loads.json").read_text())


def closed_loop(users: str, cost: LinearCost = COST) -> ServingRun:
    """Serve what vLLM 0.32 did with K = 3 and 8 slots, whose users sent the next of the lab's prompts once answered."""
    trace, _ = as_vllm(LOADS["match_len"])
    which = np.arange(LOADS["loads"][users]["requests"]) % trace.sequences
    requests = Requests(np.zeros(len(which)), trace.prompt_tokens[which], trace.output_tokens[which], which)
    return run_server(drafts_of(trace, ScheduledK({1: 3}), served=True), cost, requests, slots=8, users=int(users))


@pytest.mark.parametrize("users", LOADS["loads"])
def test_a_closed_loop_takes_as_many_steps_as_vllm(users: str) -> None:
    assert len(closed_loop(users).steps["seconds"]) == LOADS["loads"][users]["steps"]


@pytest.mark.parametrize("users", LOADS["loads"])
def test_a_load_is_forecast_from_steps_at_other_loads(users: str) -> None:
    """Within 11 % of eight runs of vLLM on an idle CPU, one thread, wall clock; the largest errors are at the ends.

    Its steps at the other five loads, by requests that decode and prompts: how often, and milliseconds on average.
    """
    others = [row for load, facts in LOADS["loads"].items() if load != users for row in facts["steps_of"]]
    decoding, prompts, count, mean_ms = np.array(others).T
    passes = np.stack([np.ones(len(count)), 4 * decoding + 64 * prompts, 3 * decoding + 64 * prompts], axis=1)
    weight = np.sqrt(count)  # least squares over the single steps
    (step_ms, target_ms, drafter_ms), _ = nnls(passes * weight[:, None], mean_ms * weight)
    run = closed_loop(users, LinearCost(LinearPass(step_ms / 1e3, target_ms / 1e3), LinearPass(1e-9, drafter_ms / 1e3)))
    output = run.requests.output_tokens
    tokens_per_s = output.sum() / run.steps["end_s"][-1]
    tpot_ms = 1e3 * ((run.finished_s - run.first_token_s) / (output - 1)).mean()
    measured = LOADS["loads"][users]
    assert tokens_per_s == pytest.approx(np.mean(measured["tokens_per_s"]), rel=0.11)
    assert tpot_ms == pytest.approx(np.mean(measured["tpot_ms"]), rel=0.11)


STEPS = json.loads((Path(__file__).parent / "vllm_steps.json").read_text())  # made by tests/support/vllm_steps.py


@pytest.mark.parametrize("load", STEPS["runs"])
def test_every_step_has_vllms_requests_and_tokens(load: str) -> None:
    """vLLM 0.32 with a draft model, K = 3 and 8 slots: requests, tokens and cached tokens of each of its steps."""
    users, budget = (int(word) for word in load.split() if word.isdigit())
    match_len = [[int(digit) for digit in text] for text in STEPS["match_len"]]
    drawn = generate(IID(0.5), sequences=len(match_len), output_tokens=len(match_len[0]), depth=3)
    counted = dataclasses.replace(
        drawn,
        match_len=np.concatenate(match_len).astype(np.uint8),
        prompt_tokens=np.array(STEPS["prompt_tokens"]),
        meta={**drawn.meta, "drafter_kind": "model"},
    )
    trace, beyond = as_engine(counted, VLLM, max_output_tokens=48)
    assert beyond == 0
    which = np.arange(16) % trace.sequences
    requests = Requests(np.zeros(16), trace.prompt_tokens[which], trace.output_tokens[which], which)
    drafts = drafts_of(trace, ScheduledK({1: 3}), served=True)
    run = run_server(drafts, COST, requests, slots=8, users=users, step_tokens=budget)
    steps = [run.steps["sequences"] + run.steps["prompts"], run.steps["tokens"], run.steps["cached_tokens"]]
    assert np.array(steps).T.tolist() == STEPS["runs"][load]


def digits(run: ServingRun, fact: str) -> list[str]:
    """A fact of every request's rounds."""
    return ["".join(map(str, run.rounds[fact][run.rounds["request"] == r])) for r in range(len(run.requests))]


def test_every_requests_rounds_are_vllms() -> None:
    run = served(SCHEDULE)
    assert digits(run, "drafted") == COUNTED["drafted"]
    assert digits(run, "accepted") == COUNTED["accepted"]
    assert (len(run.rounds["step"]), run.rounds["drafted"].sum(), run.rounds["accepted"].sum()) == (526, 1103, 626)


def test_by_its_own_step_a_rounds_k_is_another_where_the_batch_changes() -> None:
    """Where a request is over and another's prompt is prefilled, or none is left, the others would draft 5."""
    drafted = digits(served(SCHEDULE, drafts_ahead=False), "drafted")
    differing = [r for r, (own, theirs) in enumerate(zip(drafted, COUNTED["drafted"], strict=True)) if own != theirs]
    assert differing == [4, 8, 10, 11]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_rule_sees_the_sequences_of_this_step_or_of_the_last_one(ahead: bool) -> None:
    seen: list[int] = []

    class Noted(TurboSpec):
        def choose(self, state: Any, running: Running) -> int:
            assert 63 <= running.cached.mean() <= 64 + TOKENS
            seen.append(running.sequences)
            return super().choose(state, running)

    run = served(Noted(COST, 5), drafts_ahead=ahead)
    decoding = run.steps["sequences"] > 0
    in_step = run.steps["sequences"].astype(int)
    if ahead:  # those that decoded, and prompts
        begin_s = run.steps["end_s"] - run.steps["seconds"]
        in_step = np.append(0, in_step + np.isclose(run.started_s, begin_s[:, None]).sum(axis=1))[:-1]
    assert seen == in_step[decoding].tolist()
