"""A server against steps worked out by hand, and against a reference that simulates it request by request.

By hand, a step takes 1 s plus 1 s for each token of its pass: pending, verified or read. Comments number requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.batches import BatchTokens
from specsim.cost.linear import LinearCost, LinearPass
from specsim.serving.arrivals import Requests
from specsim.serving.continuous import ServingRun, run_server
from specsim.serving.draft_length import ScheduledK
from specsim.serving.drafts import Drafts
from specsim.serving.presets import find_server
from tests.support.event_loop import Asked, Chunk, Decoded, Engine, Rule, serve
from tests.support.serving_costs import COST

VLLM, LLAMA_CPP, SGLANG = (True, True), (True, False), (False, False)  # mixes, cuts


@dataclass
class Case:
    """Requests, an engine, and the expected steps and times."""

    requests: list[Asked]
    engine: Engine
    k: Rule
    steps: list[tuple[float, dict[int, Decoded], dict[int, Chunk]]]  # begin, decoded and read, by request
    first_s: list[float]
    finish_s: list[float]
    users: int | None = None
    longest_k: int = 0
    preempted: int = 0


def asked(
    prompt: int,
    output: int,
    match: dict[int, int] | None = None,
    arrival: float = 0.0,
    limit: dict[int, int] | None = None,
) -> Asked:
    """A request; `match` and `limit`, by emitted tokens, are 0 and 9 elsewhere."""
    emitted = range(output)
    return Asked(
        arrival, prompt, output, [(match or {}).get(i, 0) for i in emitted], [(limit or {}).get(i, 9) for i in emitted]
    )


def engine(
    like: tuple[bool, bool],
    slots: int = 9,
    step: int | None = None,
    kv: int | None = None,
    block: int | None = None,
    ahead: bool = False,
) -> Engine:
    return Engine(slots, step, kv, block, *like, drafts_ahead=ahead)


CASES = {
    # 0 s: 4 of 0's 6 tokens. 5 s: its other 2 emit its only token, and 1, which has just come, reads what is left, 2.
    # 10 s: 1's last prompt token. 12 s: its second output token, with 3 + 1 - 1 tokens cached. 14 s: idle.
    "prompts in chunks, arrivals": Case(
        requests=[asked(6, 1), asked(3, 2, arrival=5), asked(2, 1, arrival=30)],
        engine=engine(VLLM, step=4),
        k=lambda sequences: 0,
        steps=[
            (0, {}, {0: (4, 0)}),
            (5, {}, {0: (2, 4), 1: (2, 0)}),
            (10, {}, {1: (1, 2)}),
            (12, {1: (0, 0, 3, 0)}, {}),
            (30, {}, {2: (2, 0)}),
        ],
        first_s=[10, 12, 33],
        finish_s=[10, 14, 33],
    ),
    # Two decode: k = 0, and each round leaves the drafter one token further behind. 13 s: 0 is alone, k = 3, all
    # accepted: 3 + 3 + 1 = 7 tokens, 1 behind. 18 s: the drafter stops at 2, both rejected. 22 s: it drafts nothing.
    # 24 s: 3 tokens remain, so that 2 are drafted; 1 accepted: 9 + 2 = 11 tokens. 28 s: 1 remains, no draft.
    "rounds, and k by those that decode": Case(
        requests=[asked(4, 12, match={3: 3, 9: 1}, limit={7: 2, 8: 0}), asked(2, 3)],
        engine=engine(VLLM),
        k=lambda sequences: {1: 3, 2: 0}.get(sequences, 0),
        steps=[
            (0, {}, {0: (4, 0), 1: (2, 0)}),
            (7, {0: (0, 0, 4, 0), 1: (0, 0, 2, 0)}, {}),
            (10, {0: (0, 0, 5, 1), 1: (0, 0, 3, 1)}, {}),
            (13, {0: (3, 3, 6, 2)}, {}),
            (18, {0: (2, 2, 10, 1)}, {}),
            (22, {0: (0, 0, 11, 0)}, {}),
            (24, {0: (2, 2, 12, 0)}, {}),
            (28, {0: (0, 0, 14, 0)}, {}),
        ],
        first_s=[7, 7],
        finish_s=[30, 13],
    ),
    # 7 s: of 6 tokens, 0 takes 4; 1 has drafted 3, of which 1 is verified and accepted (2 would have been). That is not
    # all that was drafted: 1 is not behind. 2 and 3 wait. 14 s: 1 + 2 + 2 tokens decode, so that 3 reads 1 more.
    "a budget that cuts drafts": Case(
        requests=[asked(1, 6, match={1: 3}), asked(1, 5, match={1: 2, 3: 1}), asked(1, 3), asked(5, 1)],
        engine=engine(VLLM, step=6),
        k=lambda sequences: 3,
        steps=[
            (0, {}, {0: (1, 0), 1: (1, 0), 2: (1, 0), 3: (3, 0)}),
            (7, {0: (3, 3, 1, 0), 1: (3, 1, 1, 0)}, {}),
            (14, {0: (0, 0, 5, 1), 1: (1, 1, 3, 0), 2: (1, 1, 1, 0)}, {3: (1, 3)}),
            (21, {2: (0, 0, 2, 0)}, {3: (1, 4)}),
        ],
        first_s=[7, 7, 7, 24],
        finish_s=[21, 21, 24, 24],
    ),
    # 6 s: 0 and 1 decode 8 tokens though the budget is 5; 2 waits. 15 s: 1 decodes alone, so that k = 2. It takes 3,
    # 2 reads the other 2; nothing is left to admit 3. 21 s: 1 has a token to go, 2 reads its last; there is room for 3.
    "decoding whole, whatever the budget": Case(
        requests=[asked(1, 5, match={1: 3}), asked(1, 6, match={2: 2}), asked(6, 1), asked(1, 1)],
        engine=engine(LLAMA_CPP, step=5),
        k=lambda sequences: {1: 2, 2: 3}.get(sequences, 0),
        steps=[
            (0, {}, {0: (1, 0), 1: (1, 0), 2: (3, 0)}),
            (6, {0: (3, 3, 1, 0), 1: (3, 3, 1, 0)}, {}),
            (15, {1: (2, 2, 2, 0)}, {2: (2, 3)}),
            (21, {1: (0, 0, 5, 1)}, {2: (1, 5), 3: (1, 0)}),
        ],
        first_s=[6, 6, 25, 25],
        finish_s=[15, 25, 25, 25],
    ),
    # 3 s: 0 decodes, 4 tokens of a budget of 2. 8 s: 1 has come and is read in two steps, in which 0 does not decode
    # and nothing is left for 2. 14 s: 2 is read. 16 s: both decode.
    "prompts read in steps of their own": Case(
        requests=[asked(2, 6, match={2: 3}), asked(4, 1, arrival=4), asked(1, 2, arrival=4)],
        engine=engine(SGLANG, step=2),
        k=lambda sequences: 3,
        steps=[
            (0, {}, {0: (2, 0)}),
            (3, {0: (3, 3, 2, 0)}, {}),
            (8, {}, {1: (2, 0)}),
            (11, {}, {1: (2, 2)}),
            (14, {}, {2: (1, 0)}),
            (16, {0: (3, 3, 3, 0), 2: (0, 0, 1, 0)}, {}),
        ],
        first_s=[3, 14, 16],
        finish_s=[22, 14, 22],
    ),
    # 0 and 1 need 6 tokens each of 10. 2 needs 2 and would fit, but has to wait for 1. 7 s: 0 is finished. 1 and 2 are
    # admitted, and there is memory for 3, but no slot.
    "memory reserved whole, and slots": Case(
        requests=[asked(4, 2), asked(5, 1), asked(1, 1), asked(1, 1)],
        engine=engine(VLLM, slots=2, kv=10),
        k=lambda sequences: 0,
        steps=[
            (0, {}, {0: (4, 0)}),
            (5, {0: (0, 0, 4, 0)}, {}),
            (7, {}, {1: (5, 0), 2: (1, 0)}),
            (14, {}, {3: (1, 0)}),
        ],
        first_s=[5, 14, 14, 16],
        finish_s=[7, 14, 14, 16],
    ),
    # 4 blocks of 4 tokens (2 tokens are left over). 0 s: requests 0, 1, 2 take 2, 1, 1 blocks, for 4 + 1, 3 + 1, 2 + 1
    # tokens; none is left for 3. 10 s: 2 is finished; 1 takes its block, for 3 + 1 + 1 tokens. 19 s: 0 needs a third,
    # for 4 + 4 + 1: 1 is preempted. A block is free, but 3 is not admitted in this step, nor in the next, in which 1
    # waits for 2 blocks. 23 s: 0 is finished; 1 reads its 3 + 4 tokens again, emits its fifth, and its drafter lacks no
    # token any more.
    "memory by blocks": Case(
        requests=[asked(4, 6), asked(3, 6), asked(2, 1), asked(1, 1)],
        engine=engine(VLLM, kv=18, block=4),
        k=lambda sequences: 0,
        longest_k=1,
        steps=[
            (0, {}, {0: (4, 0), 1: (3, 0), 2: (2, 0)}),
            (10, {0: (0, 0, 4, 0), 1: (0, 0, 3, 0)}, {}),
            (13, {0: (0, 0, 5, 1), 1: (0, 0, 4, 1)}, {}),
            (16, {0: (0, 0, 6, 2), 1: (0, 0, 5, 2)}, {}),
            (19, {0: (0, 0, 7, 3)}, {}),
            (21, {0: (0, 0, 8, 4)}, {}),
            (23, {}, {1: (7, 0), 3: (1, 0)}),
            (32, {1: (0, 0, 7, 0)}, {}),
        ],
        first_s=[10, 10, 10, 32],
        finish_s=[23, 34, 10, 32],
        preempted=1,
    ),
    # 4 blocks of 2. 6 s: 0 keeps 2, for 2 + 1 + 1 tokens; 1 needs 3, for 3 + 1 + 1, and is preempted, because it was
    # admitted last. 9 s: 1 cannot be admitted, so that 0 decodes. 11 s: 1 reads 3 + 1 tokens.
    "a request that is preempted itself": Case(
        requests=[asked(2, 4, match={1: 1}), asked(3, 3)],
        engine=engine(SGLANG, kv=8, block=2),
        k=lambda sequences: 1,
        longest_k=1,
        steps=[
            (0, {}, {0: (2, 0), 1: (3, 0)}),
            (6, {0: (1, 1, 2, 0)}, {}),
            (9, {0: (0, 0, 4, 1)}, {}),
            (11, {}, {1: (4, 0)}),
            (16, {1: (0, 0, 4, 0)}, {}),
        ],
        first_s=[6, 6],
        finish_s=[11, 18],
        preempted=1,
    ),
    # 4 s: 1 is finished, 2 is next; k counts the 2 requests of the previous step, though 0 decodes alone. 15 s: 3 is
    # finished, but was in the previous step: k = 2, and 1 of 2 is accepted. 19 s: k = 1.
    "so many users, drafts made ahead": Case(
        requests=[asked(1, 10, match={2: 2, 5: 1, 7: 1}), asked(2, 1), asked(1, 1), asked(2, 1)],
        engine=engine(VLLM, ahead=True),
        k=lambda sequences: sequences,
        users=2,
        steps=[
            (0, {}, {0: (1, 0), 1: (2, 0)}),
            (4, {0: (2, 2, 1, 0)}, {2: (1, 0)}),
            (9, {0: (2, 2, 2, 0)}, {3: (2, 0)}),
            (15, {0: (2, 2, 5, 1)}, {}),
            (19, {0: (1, 1, 7, 0)}, {}),
            (22, {0: (0, 0, 9, 1)}, {}),
        ],
        first_s=[4, 4, 9, 15],
        finish_s=[24, 4, 9, 15],
    ),
}


def seconds(decoding: list[Decoded], reading: list[Chunk]) -> float:
    return 1.0 + sum(1 + verified for _, verified, _, _ in decoding) + sum(new for new, _ in reading)


class ByTokens(LinearCost):
    """The same seconds as a cost model of specsim."""

    def batch_draft(self, place: Any, tokens: BatchTokens) -> Any:
        return np.zeros(np.shape(tokens.new))


TOKENS = ByTokens(LinearPass(1.0, 1.0), LinearPass(1.0))


def product(
    requests: list[Asked], engine: Engine, k: Rule, cost: LinearCost, users: int | None, longest_k: int,
    kind: type[ScheduledK] = ScheduledK,
) -> ServingRun:  # fmt: skip
    """Serve the same requests in specsim, under a schedule of K by batch."""
    outputs = [each.output_tokens for each in requests]
    drawn = generate(IID(0.5), sequences=len(requests), output_tokens=outputs, depth=9)
    # What may be drafted never reaches beyond the output.
    limit = [min(m, each.output_tokens - i - 1) for each in requests for i, m in enumerate(each.limit)]
    match = [m for each in requests for m in each.match]
    lengths = {size: k(size) for size in range(1, engine.slots + 1)}
    rule = kind({**lengths, engine.slots + 1: longest_k})
    drafts = Drafts(drawn, "reference", rule, np.array(limit, dtype=np.uint8), np.array(match, dtype=np.uint8))
    order = sorted(range(len(requests)), key=lambda r: 0 if users else requests[r].arrival_s)
    sent = Requests(
        np.array([requests[r].arrival_s for r in order]), np.array([requests[r].prompt_tokens for r in order]),
        np.array([requests[r].output_tokens for r in order]), np.array(order),
    )  # fmt: skip
    rules = replace(find_server("vllm"), mixes=engine.mixes, cuts=engine.cuts, drafts_ahead=engine.drafts_ahead)
    return run_server(
        drafts, cost, sent, slots=engine.slots, server=rules, kv_tokens=engine.kv_tokens, users=users,
        step_tokens=engine.step_tokens or 10**6, block_tokens=engine.block_tokens,
    )  # fmt: skip


class OneByOne(ScheduledK):
    """A schedule that does not run compiled, because it is not exactly ScheduledK, but like any other rule."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_and_times_are_those_worked_out_by_hand(case: Case) -> None:
    served = serve(case.requests, case.engine, case.k, seconds, case.users, case.longest_k)
    assert [(step.begin_s, step.decoding, step.reading) for step in served.steps] == case.steps
    assert (served.first_s, served.finish_s, served.preempted) == (case.first_s, case.finish_s, case.preempted)
    run = product(case.requests, case.engine, case.k, TOKENS, case.users, case.longest_k)
    assert (run.first_token_s.tolist(), run.finished_s.tolist()) == (case.first_s, case.finish_s)
    assert (run.steps["end_s"] - run.steps["seconds"]).tolist() == [begin for begin, *_ in case.steps]
    assert run.steps["prompts"].tolist() == [len(reading) for *_, reading in case.steps]
    decoded: list[dict[int, tuple[int, int]]] = [{} for _ in case.steps]
    columns = ("step", "request", "drafted", "verified")
    for step, request, drafted, verified in zip(*(run.rounds[name].tolist() for name in columns), strict=True):
        decoded[step][request] = drafted, verified
    assert decoded == [{r: facts[:2] for r, facts in decoding.items()} for _, decoding, _ in case.steps]
    assert run.preemptions == case.preempted


def linear(decoding: list[Decoded], reading: list[Chunk]) -> float:
    """Seconds of a step by `COST`: each pass has a fixed time, one of each new and one of each cached token."""
    tokens = sum(1 + verified for _, verified, *_ in decoding) + sum(new for new, _ in reading)
    cached = sum(cached for *_, cached, _ in decoding) + sum(before for _, before in reading)
    taken = 0.01 + 3e-4 * tokens + 2e-6 * cached + 0.001 + 0.0005 * bool(decoding)  # K is at least 1
    for place in range(max([drafted for drafted, *_ in decoding] + [int(bool(reading))], default=0)):
        own = [(1 + behind * (place == 0), cached + place) for d, _, cached, behind in decoding if d > place]
        own += reading if place == 0 else []
        taken += 0.002 + sum(1e-4 * new + 5e-7 * before for new, before in own)
    return taken


@pytest.mark.parametrize("seed", range(60))
def test_a_random_load_ends_when_the_reference_says(seed: int) -> None:
    rng = random.Random(seed)
    block, longest = rng.choice([None, 1, 3, 4]), rng.randint(1, 4)
    requests = []
    for _ in range(rng.randint(1, 8)):
        output = rng.randint(1, 9)
        match = [min(rng.randint(0, 4), max(0, output - i - 1)) for i in range(output)]
        asked = Asked(rng.choice([0.0, 0.03, rng.random() / 5]), rng.randint(1, 9), output, match, [])
        asked.limit = [rng.randint(1, 5) for _ in range(output)]
        requests.append(asked)
    need = max(each.prompt_tokens + each.output_tokens + longest for each in requests) + 3
    mixes, cuts = rng.choice([VLLM, LLAMA_CPP, SGLANG])
    ahead = (mixes, cuts) == VLLM  # others have a single K here: they choose it before they preempt
    budget, memory = rng.choice([None, 1, 3, 5, 9]), rng.choice([None, need, need * 2])
    here = Engine(rng.randint(1, 5), budget, memory, block, mixes, cuts, ahead)
    lengths = [rng.randint(1, longest) if ahead else longest for _ in range(20)]
    users = rng.choice([None, 1, 3])
    expected = serve(requests, here, lambda size: lengths[size], linear, users, longest)
    kind = rng.choice([ScheduledK, OneByOne])
    run = product(requests, here, lambda size: lengths[size], COST, users, longest, kind)
    order = run.requests.sequence
    assert run.finished_s == pytest.approx(np.array(expected.finish_s)[order], rel=1e-9)
    assert run.first_token_s == pytest.approx(np.array(expected.first_s)[order], rel=1e-9)
    assert (len(run.steps["seconds"]), run.preemptions) == (len(expected.steps), expected.preempted)


def test_a_request_that_can_never_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0 needs more memory"):
        serve([asked(3, 6)], engine(SGLANG, kv=5, block=1), lambda sequences: 0, seconds)
