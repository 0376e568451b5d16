"""Simulate a continuously batching server request by request: slow, plain, and sharing nothing with the program's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decoded = tuple[int, int, int, int]  # drafted, verified, cached, behind
Chunk = tuple[int, int]  # new, before
Rule = Callable[[int], int]  # draft length by the number of requests
Seconds = Callable[[list[Decoded], list[Chunk]], float]  # of a step


@dataclass
class Asked:
    """A request: `match[i]` and `limit[i]` are of a round that starts when `i` output tokens exist (`i` >= 1)."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    match: list[int]  # drafted tokens that would be accepted, cut to what can be accepted
    limit: list[int]  # most tokens that the drafter drafts


@dataclass
class Engine:
    """How an engine makes up its steps; None: no limit."""

    slots: int
    step_tokens: int | None  # budget of a step
    kv_tokens: int | None
    block_tokens: int | None  # None: a request reserves prompt and output whole when it is admitted
    mixes: bool  # a step can both read prompts and decode (vLLM, llama.cpp); False: SGLang
    cuts: bool  # the budget binds decoding requests, too (vLLM)
    drafts_ahead: bool  # the draft length follows from the number of requests of the step before


@dataclass
class Step:
    """What happened in a step, by the requests' numbers."""

    begin_s: float
    seconds: float = 0.0
    k: int | None = None  # None: nobody decoded
    decoding: dict[int, Decoded] = field(default_factory=dict)
    reading: dict[int, Chunk] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)


@dataclass
class Served:
    """When each request got its first token and when it finished, in seconds; the steps; the number of preemptions."""

    first_s: list[float]
    finish_s: list[float]
    steps: list[Step]
    preempted: int


@dataclass(eq=False)
class Request:
    """A request on its way through the server."""

    number: int
    asked: Asked
    first_s: float = math.nan
    finish_s: float = math.nan
    emitted: int = 0
    to_read: int = 0  # its prompt, and what it had emitted if it was preempted
    read: int = 0
    behind: int = 0
    held: int = 0  # tokens of memory, or blocks

    @property
    def decodes(self) -> bool:
        return self.read == self.to_read

    @property
    def remaining(self) -> int:
        return self.asked.output_tokens - self.emitted

    def emit(self, tokens: int, now_s: float) -> None:
        self.first_s = now_s if self.emitted == 0 else self.first_s
        self.emitted += min(tokens, self.remaining)
        self.finish_s = now_s  # so far


class Server:
    """Requests that wait and requests that are admitted, and how a step is made up of them."""

    def __init__(self, engine: Engine, k: Rule, longest_k: int) -> None:
        self.engine, self.rule, self.longest_k = engine, k, longest_k
        self.waiting: list[Request] = []
        self.admitted: list[Request] = []  # in order of admission
        self.memory = math.inf if engine.kv_tokens is None else engine.kv_tokens // (engine.block_tokens or 1)
        self.budget = math.inf if engine.step_tokens is None else engine.step_tokens
        self.requests_before = 0  # in the step before; in the first step nobody decodes

    def plan(self, now_s: float) -> Step:
        """Say what the next step does."""
        self.step = Step(now_s)
        if not self.engine.mixes:  # SGLang: read while there is something to read, and decode otherwise
            self.admit(self.read_all(self.budget))
            if not self.step.reading:
                self.decode_all()
        elif self.engine.cuts:  # vLLM: spend the budget from the first admitted to the last
            self.admit(self.serve_in_order())
        else:  # llama.cpp: decode whatever the budget, and read for what is left of it
            self.admit(self.read_all(self.budget - self.decode_all()))
        self.requests_before = len(self.step.decoding) + len(self.step.reading)
        if self.requests_before == 0:
            raise ValueError(f"request {self.waiting[0].number} needs more memory than the engine has")
        return self.step

    def serve_in_order(self) -> float:
        """Let requests decode or read as they stand, as long as tokens are left; gives those left."""
        left = self.budget
        # Drafts exist before anybody knows whom the budget reaches: the rule sees all that could decode.
        decoders = sum(request.decodes for request in self.admitted)
        for request in list(self.admitted):
            if left <= 0 or request not in self.admitted:  # those behind one that was preempted were, too
                break
            if not request.decodes:
                left -= self.read(request, left)
            elif self.can_go_on(request):
                left -= self.decode(request, decoders, left)
        return left

    def decode_all(self) -> int:
        """Let all decode whole for whom there is memory; gives the tokens that they take."""
        decoders = [request for request in list(self.admitted) if request.decodes and self.can_go_on(request)]
        return sum(self.decode(request, len(decoders), math.inf) for request in decoders)

    def read_all(self, left: float) -> float:
        for request in self.admitted:
            left -= self.read(request, left)  # nothing where it decodes
        return left

    def admit(self, left: float) -> None:
        """Admit the first of the queue, again and again, as long as there are slots, memory and budget."""
        while self.waiting and left > 0 and len(self.admitted) < self.engine.slots and not self.step.preempted:
            request = self.waiting[0]
            if not self.takes_memory(request):
                break
            self.admitted.append(self.waiting.pop(0))
            request.to_read, request.read, request.behind = request.asked.prompt_tokens + request.emitted, 0, 0
            left -= self.read(request, left)

    def decode(self, request: Request, decoders: int, left: float) -> int:
        """Let a request decode; gives the tokens that it takes of those left."""
        self.step.k = self.rule(self.requests_before if self.engine.drafts_ahead else decoders)
        drafted = min(self.step.k, request.asked.limit[request.emitted], request.remaining - 1)
        verified = int(min(drafted, left - 1))
        cached = request.asked.prompt_tokens + request.emitted - 1
        self.step.decoding[request.number] = (drafted, verified, cached, request.behind)
        return 1 + verified

    def read(self, request: Request, left: float) -> int:
        """Let a request read a chunk, if any tokens are left; gives those that it takes."""
        new = int(max(min(request.to_read - request.read, left), 0))
        if new > 0:
            self.step.reading[request.number] = (new, request.read)
        return new

    def takes_memory(self, request: Request) -> bool:
        """Hold what the request needs now, if that much is free."""
        asked, block = request.asked, self.engine.block_tokens
        by_now = asked.prompt_tokens + request.emitted + self.longest_k
        needed = math.ceil(by_now / block) if block else asked.prompt_tokens + asked.output_tokens
        free = self.memory - sum(other.held for other in self.admitted if other is not request)
        request.held = needed if needed <= free else request.held
        return needed <= free

    def can_go_on(self, request: Request) -> bool:
        """Take memory for a round, if need be from those admitted last; False: the request itself had to go."""
        while request in self.admitted and not self.takes_memory(request):
            self.waiting.insert(0, self.admitted.pop())
            self.step.preempted.append(self.waiting[0].number)
        return request in self.admitted

    def end(self, now_s: float) -> list[Request]:
        """Emit the step's tokens; gives the requests that are over, in the order in which they stood."""
        for request in self.admitted:
            if request.number in self.step.reading:
                request.read += self.step.reading[request.number][0]
                if request.decodes:
                    request.emit(1, now_s)
            elif request.number in self.step.decoding:
                drafted, verified, _, behind = self.step.decoding[request.number]
                accepted = min(verified, request.asked.match[request.emitted])
                request.behind = behind + 1 if self.step.k == 0 else int(0 < drafted == accepted)
                request.emit(accepted + 1, now_s)
        over = [request for request in self.admitted if request.remaining == 0]
        self.admitted = [request for request in self.admitted if request.remaining > 0]
        return over


def serve(
    requests: Sequence[Asked], engine: Engine, k: Rule, seconds: Seconds, users: int | None = None, longest_k: int = 0
) -> Served:
    """Serve requests as they arrive, or for so many users; memory by blocks is kept for drafts of `longest_k`."""
    everybody = [Request(number, asked) for number, asked in enumerate(requests)]
    server, steps, now_s = Server(engine, k, longest_k), [], 0.0
    server.waiting = [] if users is None else everybody[:users]
    coming = everybody[users:] if users else sorted(everybody, key=lambda request: request.asked.arrival_s)
    while coming or server.waiting or server.admitted:
        if not server.waiting and not server.admitted:
            now_s = max(now_s, coming[0].asked.arrival_s)
        while users is None and coming and coming[0].asked.arrival_s <= now_s:
            server.waiting.append(coming.pop(0))
        step = server.plan(now_s)
        step.seconds = seconds(list(step.decoding.values()), list(step.reading.values()))
        steps.append(step)
        now_s += step.seconds
        for _ in server.end(now_s):
            if users is not None and coming:
                server.waiting.append(coming.pop(0))
    first_s, finish_s = [request.first_s for request in everybody], [request.finish_s for request in everybody]
    return Served(first_s, finish_s, steps, sum(len(step.preempted) for step in steps))
