"""Continuous batching: requests join and leave the batch between rounds, as in serving engines.

Between two steps the engine admits requests in the order of their arrival, while there is a slot and room in the KV
cache. A step decodes a round of every running request, and its passes read the prompts of admitted requests, all but
the last token, which is pending in their first round: whole, or in chunks by a token budget of the step. A request
reserves memory for its prompt and its whole output, so that no request is ever evicted; or blocks as it needs them, as
in vLLM: where none is free, the request that was admitted last gives its blocks back, and reads its prompt and output
again when it is admitted anew.

With a fixed number of users, no decision depends on time: the seconds of all steps are computed at once, at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import simpy

from specsim.cost.batches import BatchCost
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.serving.arrivals import Requests
from specsim.serving.costs import Prompts, round_seconds
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
    preemptions : times that a request gave its memory back
    """

    label: str
    requests: Requests
    submitted_s: Floats
    started_s: Floats
    first_token_s: Floats
    finished_s: Floats
    steps: dict[str, Floats]
    rounds: dict[str, Ints]
    preemptions: int = 0


def run_server(
    drafts: Drafts,
    cost: BatchCost,
    requests: Requests,
    *,
    slots: int,
    kv_tokens: int | None = None,
    users: int | None = None,
    drafts_ahead: bool = False,
    step_tokens: int | None = None,
    block_tokens: int | None = None,
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
    step_tokens : most tokens of a step's target pass: requests that decode take theirs first, prompts fill the rest, in
        chunks; default: prompts are read whole
    block_tokens : tokens of a block of the KV cache, which requests take as they need them; default: a request
        reserves its whole length

    Raises InputError for no slot, no user, no token of a step or block, or a request that the cache can never hold.
    """
    sizes = {"slots": slots, "users": users, "step_tokens": step_tokens, "block_tokens": block_tokens}
    if any(size is not None and size < 1 for size in sizes.values()):
        named = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        raise InputError(f"{named}; give at least 1 of each")
    largest = int((requests.prompt_tokens + requests.output_tokens).max())
    if block_tokens is not None:  # and room for the longest draft, which may be rejected
        largest = block_tokens * -(-(largest + drafts.rule.max_draft_tokens) // block_tokens)
    if kv_tokens is not None and largest > kv_tokens:
        raise InputError(
            f"a request of {largest} tokens, prompt and output, never fits in a cache of {kv_tokens}; raise kv_tokens"
        )
    memory = _Memory(len(requests), kv_tokens or int(1e18), block_tokens)
    server = _Server(drafts, cost, requests, slots, memory, drafts_ahead, step_tokens, timed=users is None)
    if users is None:
        server.env.process(_arrivals(server))
    else:
        turns = deque(range(len(requests)))
        for _ in range(users):
            server.env.process(_user(server, turns))
    server.env.process(server.work())
    server.env.run()
    return server.result()


def _arrivals(server: _Server) -> Events:
    for request, arrival_s in enumerate(server.requests.arrival_s.tolist()):
        yield server.env.timeout(arrival_s - server.env.now)
        server.submit(request)


def _user(server: _Server, turns: deque[int]) -> Events:
    while turns:
        yield server.submit(turns.popleft())


class _Memory:
    """Free tokens of the KV cache, in blocks, and what each request holds."""

    def __init__(self, requests: int, tokens: int, block_tokens: int | None) -> None:
        self.by_blocks = block_tokens is not None
        self.block_tokens = block_tokens or 1
        self.free_blocks = tokens // self.block_tokens
        self.held = [0] * requests

    def hold(self, request: int, tokens: int) -> bool:
        """Let a request hold so many tokens, if they are free."""
        more = -(-tokens // self.block_tokens) - self.held[request]
        if more > self.free_blocks:
            return False
        if more > 0:
            self.free_blocks -= more
            self.held[request] += more
        return True

    def release(self, request: int) -> None:
        self.free_blocks += self.held[request]
        self.held[request] = 0


class _Server:
    """The engine's state. timed : whether a step takes its seconds; else a tick, and seconds are computed at the end"""

    def __init__(
        self,
        drafts: Drafts,
        cost: BatchCost,
        requests: Requests,
        slots: int,
        memory: _Memory,
        drafts_ahead: bool,
        step_tokens: int | None,
        *,
        timed: bool,
    ) -> None:
        count = len(requests)
        self.drafts, self.cost, self.requests, self.slots, self.memory = drafts, cost, requests, slots, memory
        self.drafts_ahead, self.last_sequences = drafts_ahead, 0  # of the last step, prompts included
        self.step_tokens, self.timed = step_tokens, timed
        self.rule = drafts.rule
        self.state = self.rule.initial_state()
        self.env = simpy.Environment()
        self.waiting: deque[int] = deque()
        self.woken = self.env.event()
        self.answered = [self.env.event() for _ in range(count)]
        self.running: Ints = np.empty(0, dtype=np.int64)
        self.reading: list[int] = []  # admitted, whose prompts are not read whole, in the order of admission
        self.admission = np.zeros(count, dtype=np.int64)  # when it was admitted last, counted from 1
        self.admissions = self.preemptions = 0
        self.emitted, self.read = np.zeros((2, count), dtype=np.int64)
        self.behind, self.verified, self.accepted = np.zeros((3, count), dtype=np.int64)
        self.row: Ints = np.array(drafts.trace.offsets[requests.sequence], dtype=np.int64)
        # A text of another length than recorded ends where the request says, and drafts no further.
        self.reshaped = requests.output_tokens != drafts.trace.output_tokens[requests.sequence]
        self.submitted_s, self.started_s, self.first_token_s, self.finished_s = np.full((4, count), np.nan)
        self.left = count
        self.rounds: list[tuple[Ints, ...]] = []  # columns of each step's rounds
        self.prompts: list[tuple[Ints, ...]] = []  # and of the parts of prompts that it read
        self.speculates: list[bool] = []
        self.ends_s: list[float] = []
        self.seconds: list[float] = []

    def submit(self, request: int) -> simpy.Event:
        """Submit a request; the event is its answer."""
        self.submitted_s[request] = self.env.now
        self.waiting.append(request)
        if not self.woken.triggered:
            self.woken.succeed()
        return self.answered[request]

    def work(self) -> Events:
        while self.left:
            if not self.running.size and not self.waiting and not self.reading:
                self.woken = self.env.event()
                yield self.woken
            seen = -1
            while seen != len(self.waiting):  # all who ask at this moment, such as users who were just answered
                seen = len(self.waiting)
                yield self.env.timeout(0)
            if not self._make_room():
                self._admit()
            yield from self._step()

    def _make_room(self) -> bool:
        """Let running requests hold what a round may need, the first admitted first; whether one was preempted."""
        if not self.memory.by_blocks:
            return False
        before = self.preemptions
        for request in self.running[np.argsort(self.admission[self.running])].tolist():
            while self.admission[request] and not self.memory.hold(request, self._needed(request)):
                self._preempt()
        return self.preemptions > before

    def _needed(self, request: int) -> int:
        """Tokens that a request may hold at the end of its next round."""
        prompt, emitted = int(self.requests.prompt_tokens[request]), int(self.emitted[request])
        return prompt + emitted + self.rule.max_draft_tokens

    def _preempt(self) -> None:
        """Take the memory of the request that was admitted last; it waits before all others."""
        last = int(np.argmax(self.admission))
        self.memory.release(last)
        self.admission[last] = self.read[last] = self.behind[last] = 0
        self.running = self.running[self.running != last]
        self.reading = [request for request in self.reading if request != last]
        self.waiting.appendleft(last)
        self.preemptions += 1

    def _admit(self) -> None:
        """Admit waiting requests in order: a smaller request behind one that does not fit waits too."""
        requests = self.requests
        while self.waiting and self.running.size + len(self.reading) < self.slots:
            request = self.waiting[0]
            whole = int(requests.prompt_tokens[request] + requests.output_tokens[request])
            if not self.memory.hold(request, self._needed(request) if self.memory.by_blocks else whole):
                break
            self.waiting.popleft()
            self.admissions += 1
            self.admission[request] = self.admissions
            if np.isnan(self.started_s[request]):
                self.started_s[request] = self.env.now
            self.reading.append(request)
        self._start_read()

    def _start_read(self) -> None:
        """Let admitted requests run whose prompts are read."""
        ready = [request for request in self.reading if self.read[request] == self._to_read(request)]
        if ready:
            self.running = np.concatenate([self.running, np.array(ready, dtype=np.int64)])
            self.reading = [request for request in self.reading if request not in set(ready)]

    def _to_read(self, request: int) -> int:
        """Tokens that passes read before a request decodes: of its prompt, and what it has emitted before."""
        return int(self.requests.prompt_tokens[request] + self.emitted[request]) - 1

    def _step(self) -> Events:
        """Decode a round of every running request, and read prompts of others."""
        now, requests = self.running, self.requests
        sequence, behind = requests.sequence[now], self.behind[now]
        cached = requests.prompt_tokens[now] - 1 + self.emitted[now]
        known = self._known(now, cached)
        if now.size:
            turn = self.drafts.decode(self.state, known, sequence, self.row[now], self.reshaped[now])
        else:
            turn = DraftRounds(now, now, now, now, now, now, speculates=False)
        chunks = self._chunks(int((turn.verified + 1).sum()) * (1 + self.drafts.masks))
        self.last_sequences = len(now) + len(chunks[0])
        step = np.full_like(now, len(self.ends_s))
        self.rounds.append((step, now, turn.drafted, turn.verified, turn.accepted, turn.emitted, behind, cached))
        self.prompts.append((np.full_like(chunks[0], len(self.ends_s)), *chunks[1:]))
        self.speculates.append(turn.speculates)
        seconds = float(self._seconds(slice(-1, None))[0]) if self.timed else 1.0
        yield self.env.timeout(seconds)
        self.ends_s.append(self.env.now)
        self.seconds.append(seconds)
        if now.size:
            self.state = self.rule.update(self.state, known, turn)
        self.verified[now] += turn.verified
        self.accepted[now] += turn.accepted
        self.behind[now], self.row[now] = turn.behind, turn.row
        self.first_token_s[now[self.emitted[now] == 0]] = self.env.now
        self.emitted[now] += turn.emitted
        over = self.emitted[now] == requests.output_tokens[now]
        self.running = now[~over]
        self.left -= int(over.sum())
        self.finished_s[now[over]] = self.env.now
        for request in now[over].tolist():
            self.memory.release(request)
            self.admission[request] = 0
            self.answered[request].succeed()
        self.read[chunks[0]] += chunks[1]
        self._start_read()

    def _known(self, now: Ints, cached: Ints) -> Running:
        """What the rule may know of the running requests."""
        seen = self.last_sequences or len(now) if self.drafts_ahead else len(now)
        remaining = self.requests.output_tokens[now] - self.emitted[now]
        facts = (cached, remaining, self.verified[now], self.accepted[now], self.behind[now], seen)
        return Running(now, *facts)

    def _chunks(self, decoding_tokens: int) -> tuple[Ints, Ints, Ints]:
        """Requests whose prompts the step reads, the new tokens of each, and those read before."""
        room = self.step_tokens - decoding_tokens if self.step_tokens is not None else int(1e18)
        taken = []
        for request in self.reading:
            new = min(self._to_read(request) - int(self.read[request]), room)
            if new <= 0:
                break
            room -= new
            taken.append((request, new, int(self.read[request])))
        columns = np.array(taken, dtype=np.int64).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]

    def _seconds(self, steps: slice) -> Floats:
        """Seconds of these steps."""
        step, _, drafted, verified, _, _, behind, cached = _columns(self.rounds[steps])
        read_in, new, before = _columns(self.prompts[steps])
        first = len(self.rounds) - 1 if steps.start == -1 else 0
        drafter = self.rule.max_draft_tokens > 0 and not self.drafts.masks
        return round_seconds(
            self.cost,
            step - first,
            drafted,
            behind,
            cached,
            np.array(self.speculates[steps])[step - first],
            self.drafts.tree,
            verified,
            Prompts(read_in - first, new, before, drafter) if len(read_in) else None,
            self.drafts.masks,
        ).total_s

    def result(self) -> ServingRun:
        """Steps and times, in seconds."""
        step, request, drafted, verified, accepted, emitted, _, _ = _columns(self.rounds)
        times = np.array([self.submitted_s, self.started_s, self.first_token_s, self.finished_s])
        ends_s, seconds = np.array(self.ends_s), np.array(self.seconds)
        if not self.timed:
            seconds = self._seconds(slice(None))
            ends_s = np.cumsum(seconds)
            times = np.concatenate([[0.0], ends_s])[times.astype(np.int64)]
        counts = [np.ones_like(step), emitted, drafted, verified, accepted]
        sums = [np.bincount(step, count, minlength=len(ends_s)) for count in counts]
        steps = dict(zip(Step._fields, [ends_s, seconds, *sums], strict=True))
        rounds = dict(zip(RequestRound._fields, [step, request, drafted, verified, accepted], strict=True))
        submitted_s, started_s, first_token_s, finished_s = times
        return ServingRun(
            self.drafts.label,
            self.requests,
            submitted_s,
            started_s,
            first_token_s,
            finished_s,
            steps,
            rounds,
            self.preemptions,
        )


def _columns(parts: list[tuple[Ints, ...]]) -> list[Ints]:
    return [np.concatenate(column) for column in zip(*parts, strict=True)]
