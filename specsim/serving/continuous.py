"""Continuous batching: requests join and leave the batch between rounds, as in serving engines.

Between two steps the engine admits requests in the order of their arrival, while there is a slot and room in the KV
cache. A step decodes a round of every running request, and its passes prefill the prompts of newly admitted requests,
all but the last token, which is pending in their first round. A request reserves memory for its prompt and its whole
output, so that no request is ever evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import simpy

from specsim.cost.batches import BatchCost, BatchTokens
from specsim.io.arrays import Floats, Ints, Seconds
from specsim.io.errors import InputError
from specsim.serving.arrivals import Requests
from specsim.serving.costs import round_seconds
from specsim.serving.draft_length import DraftRounds, Running
from specsim.serving.drafts import Drafts

Events = Generator[simpy.Event, Any, None]


class Step(NamedTuple):
    """A step of the engine that ended at `end_s`: a round of some sequences, or of none if it only prefills."""

    end_s: float
    seconds: float
    sequences: int
    output_tokens: int
    drafted: int
    verified: int
    accepted: int


class RequestRound(NamedTuple):
    """A round of a request in a step."""

    step: int
    request: int
    drafted: int
    verified: int
    accepted: int


@dataclass(frozen=True, eq=False)
class ServingRun:
    """Steps of a server and times of its requests.

    requests : as they were asked
    submitted_s, started_s, first_token_s, finished_s : float [N], when each was asked, admitted and answered
    steps : in order, an array [Q] per field of `Step`
    rounds : of every request, in order of their steps, an array [R] per field of `RequestRound`
    """

    label: str
    requests: Requests
    submitted_s: Floats
    started_s: Floats
    first_token_s: Floats
    finished_s: Floats
    steps: dict[str, Floats]
    rounds: dict[str, Ints]


def run_server(
    drafts: Drafts,
    cost: BatchCost,
    requests: Requests,
    *,
    slots: int,
    kv_tokens: int | None = None,
    users: int | None = None,
    drafts_ahead: bool = False,
) -> ServingRun:
    """Serve requests by continuous batching.

    drafts : drafts of every sequence, see `drafts_of`
    cost : seconds of passes over batches
    requests : requests and their arrival times
    slots : most sequences of a batch
    kv_tokens : tokens that the KV cache holds; default: unlimited
    users : closed loop: number of users, each of whom sends the next request as soon as the last is answered
    drafts_ahead : whether a round's draft is made at the end of the step before, as in vLLM, so that a rule sees how
        many sequences that step had, prompts and finished requests included

    Raises InputError for no slot, no user, or a request that the cache can never hold.
    """
    if slots < 1 or (users is not None and users < 1):
        raise InputError(f"slots={slots}, users={users}; give at least 1 of each")
    largest = int((requests.prompt_tokens + requests.output_tokens).max())
    if kv_tokens is not None and largest > kv_tokens:
        raise InputError(
            f"a request of {largest} tokens, prompt and output, never fits in a cache of {kv_tokens}; raise kv_tokens"
        )
    server = _Server(drafts, cost, requests, slots, kv_tokens or int(1e18), drafts_ahead)
    if users is None:
        server.env.process(_arrivals(server))
    else:
        turns = deque(range(len(requests)))
        for _ in range(users):
            server.env.process(_user(server, turns))
    server.env.process(server.work())
    server.env.run()
    columns = zip(*server.steps, strict=True)
    rounds = zip(*server.rounds, strict=True)
    return ServingRun(
        label=drafts.label,
        requests=requests,
        submitted_s=server.submitted_s,
        started_s=server.started_s,
        first_token_s=server.first_token_s,
        finished_s=server.finished_s,
        steps={name: np.array(column, dtype=np.float64) for name, column in zip(Step._fields, columns, strict=True)},
        rounds={name: np.concatenate(column) for name, column in zip(RequestRound._fields, rounds, strict=True)},
    )


def _arrivals(server: _Server) -> Events:
    for request, arrival_s in enumerate(server.requests.arrival_s.tolist()):
        yield server.env.timeout(arrival_s - server.env.now)
        server.submit(request)


def _user(server: _Server, turns: deque[int]) -> Events:
    while turns:
        yield server.submit(turns.popleft())


class _Server:
    """The engine's state."""

    def __init__(
        self, drafts: Drafts, cost: BatchCost, requests: Requests, slots: int, kv_tokens: int, drafts_ahead: bool
    ) -> None:
        count = len(requests)
        self.drafts, self.cost, self.requests, self.slots = drafts, cost, requests, slots
        self.drafts_ahead, self.last_sequences = drafts_ahead, 0  # of the last step, prompts included
        self.rule = drafts.rule
        self.state = self.rule.initial_state()
        self.env = simpy.Environment()
        self.memory = simpy.Container(self.env, capacity=kv_tokens, init=kv_tokens)
        self.waiting: deque[int] = deque()
        self.woken = self.env.event()
        self.answered = [self.env.event() for _ in range(count)]
        self.running: Ints = np.empty(0, dtype=np.int64)
        self.emitted: Ints = np.zeros(count, dtype=np.int64)
        self.behind, self.verified, self.accepted = np.zeros((3, count), dtype=np.int64)
        self.row: Ints = np.array(drafts.trace.offsets[requests.sequence], dtype=np.int64)
        # A text of another length than recorded ends where the request says, and drafts no further.
        self.reshaped = requests.output_tokens != drafts.trace.output_tokens[requests.sequence]
        self.submitted_s, self.started_s, self.first_token_s, self.finished_s = np.full((4, count), np.nan)
        self.finished_now = 0  # in the last step
        self.steps: list[Step] = []
        self.rounds: list[tuple[Ints, ...]] = []

    def submit(self, request: int) -> simpy.Event:
        """Submit a request; the event is its answer."""
        self.submitted_s[request] = self.env.now
        self.waiting.append(request)
        if not self.woken.triggered:
            self.woken.succeed()
        return self.answered[request]

    def work(self) -> Events:
        left = len(self.requests)
        while left:
            if not self.running.size and not self.waiting:
                self.woken = self.env.event()
                yield self.woken
            admitted: list[int] = []
            yield from self._admit(admitted)
            entered = np.array(admitted, dtype=np.int64)
            prompts = self.requests.prompt_tokens[entered] - 1
            self.started_s[entered] = self.env.now
            self.running = np.concatenate([self.running, entered[prompts == 0]])
            yield from self._step(prompts[prompts > 0])
            left -= self.finished_now
            self.running = np.concatenate([self.running, entered[prompts > 0]])
            yield self.env.timeout(0)  # users who were answered ask again before the next round

    def _admit(self, admitted: list[int]) -> Events:
        while self.waiting and self.running.size + len(admitted) < self.slots:
            need = self._held(self.waiting[0])
            if need > self.memory.level:
                break  # in order: a smaller request behind it waits too
            yield self.memory.get(need)
            admitted.append(self.waiting.popleft())

    def _held(self, request: int) -> int:
        return int(self.requests.prompt_tokens[request] + self.requests.output_tokens[request])

    def _step(self, prompts: Ints) -> Events:
        """Decode a round of every running request, and prefill prompts of these lengths."""
        now, requests = self.running, self.requests
        sequence, behind = requests.sequence[now], self.behind[now]
        cached = requests.prompt_tokens[now] - 1 + self.emitted[now]
        known = self._known(now, cached)
        self.last_sequences = len(now) + len(prompts)
        if now.size:
            turn = self.drafts.decode(self.state, known, sequence, self.row[now], behind, self.reshaped[now])
        else:
            turn = DraftRounds(now, now, now, now, now, now, speculates=False)
        seconds = self._seconds(prompts, turn, behind, cached)
        yield self.env.timeout(seconds)
        columns = (turn.drafted, turn.verified, turn.accepted)
        counts = (len(now), *(int(column.sum()) for column in (turn.emitted, *columns)))
        self.rounds.append((np.full_like(now, len(self.steps)), now, *columns))
        self.steps.append(Step(self.env.now, seconds, *counts))
        if now.size:
            self.state = self.rule.update(self.state, known, turn)
        self.verified[now] += turn.verified
        self.accepted[now] += turn.accepted
        self.behind[now], self.row[now] = turn.behind, turn.row
        self.first_token_s[now[self.emitted[now] == 0]] = self.env.now
        self.emitted[now] += turn.emitted
        over = self.emitted[now] == requests.output_tokens[now]
        self.running, self.finished_now = now[~over], int(over.sum())
        self.finished_s[now[over]] = self.env.now
        for request in now[over].tolist():
            yield self.memory.put(self._held(request))
            self.answered[request].succeed()

    def _known(self, now: Ints, cached: Ints) -> Running:
        """What the rule may know of the running requests."""
        seen = self.last_sequences or len(now) if self.drafts_ahead else len(now)
        remaining = self.requests.output_tokens[now] - self.emitted[now]
        return Running(now, cached, remaining, self.verified[now], self.accepted[now], seen)

    def _seconds(self, prompts: Ints, turn: DraftRounds, behind: Ints, cached: Ints) -> float:
        """Seconds of a step. Prompts share the passes of the round that others decode, where there are such."""
        cost, count, drafted = self.cost, len(cached), turn.drafted
        same_round = np.zeros(count, dtype=np.int64)
        decoding = round_seconds(
            cost, same_round, drafted, behind, cached, turn.speculates, self.drafts.tree, turn.verified
        )
        total_s = float(decoding.total_s.sum())
        if not prompts.size:
            return total_s

        def added_s(seconds: Callable[[BatchTokens], Seconds], new: Ints, before: Ints) -> float:
            whole = BatchTokens.of(np.append(new, prompts), np.append(before, np.zeros_like(prompts)))
            return float(seconds(whole)) - (float(seconds(BatchTokens.of(new, before))) if new.size else 0.0)

        total_s += added_s(cost.batch_verify, turn.verified + 1, cached)
        if self.rule.max_draft_tokens:
            drafting = drafted > 0
            total_s += added_s(partial(cost.batch_draft, 0), 1 + behind[drafting], cached[drafting])
        return total_s if count else total_s + cost.step_s
