"""Simulate a continuously batching server request by request: slow and simple, without any code of specsim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decoded = tuple[int, int, int, int]  # drafted, verified, tokens in the KV cache, tokens that the drafter's cache lacks
Chunk = tuple[int, int]  # tokens of a prompt that are read, tokens of it that were read before
Rule = Callable[[int], int]  # draft length by the number of requests
Seconds = Callable[[list[Decoded], list[Chunk]], float]  # of a step


@dataclass
class Asked:
    """A request. `match[i]` and `limit[i]` hold for a round that starts after `i` output tokens (`i` >= 1)."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    match: list[int]  # drafted tokens that would be accepted, cut to what can be accepted
    limit: list[int]  # most tokens that the drafter drafts


@dataclass
class Engine:
    """Limits and rules of an engine's scheduler; None: no limit."""

    slots: int
    step_tokens: int | None  # budget of a step
    kv_tokens: int | None
    block_tokens: int | None  # None: a request reserves prompt and output whole when it is admitted
    mixes: bool  # a step can both read prompts and decode (vLLM, llama.cpp); False: SGLang
    cuts: bool  # the budget binds decoding requests, too (vLLM)
    drafts_ahead: bool  # the draft length follows from the number of requests of the step before


@dataclass
class Step:
    """A step: what each request did, by its number."""

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
    """State of a request in the server."""

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
    """Waiting and admitted requests, and the scheduler that fills a step with them."""

    def __init__(self, engine: Engine, k: Rule, longest_k: int) -> None:
        self.engine, self.rule, self.longest_k = engine, k, longest_k
        self.waiting: list[Request] = []
        self.admitted: list[Request] = []  # in order of admission
        self.memory = math.inf if engine.kv_tokens is None else engine.kv_tokens // (engine.block_tokens or 1)
        self.budget = math.inf if engine.step_tokens is None else engine.step_tokens
        self.requests_before = 0  # in the step before; in the first step nobody decodes

    def plan(self, now_s: float) -> Step:
        """Schedule the next step."""
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
        """Decode or prefill requests in the order of admission within the budget; return the tokens left."""
        left = self.budget
        # Drafts are made before the budget is spent, so the rule counts all requests that could decode.
        decoders = sum(request.decodes for request in self.admitted)
        for request in list(self.admitted):
            if left <= 0 or request not in self.admitted:  # preempted, as were all that were admitted later
                break
            if not request.decodes:
                left -= self.read(request, left)
            elif self.can_go_on(request):
                left -= self.decode(request, decoders, left)
        return left

    def decode_all(self) -> int:
        """Decode all requests for which there is memory, with whole drafts; return the tokens that they take."""
        decoders = [request for request in list(self.admitted) if request.decodes and self.can_go_on(request)]
        return sum(self.decode(request, len(decoders), math.inf) for request in decoders)

    def read_all(self, left: float) -> float:
        for request in self.admitted:
            left -= self.read(request, left)  # nothing where it decodes
        return left

    def admit(self, left: float) -> None:
        """Admit requests from the front of the queue as long as there are slots, memory and budget."""
        while self.waiting and left > 0 and len(self.admitted) < self.engine.slots and not self.step.preempted:
            request = self.waiting[0]
            if not self.takes_memory(request):
                break
            self.admitted.append(self.waiting.pop(0))
            request.to_read, request.read, request.behind = request.asked.prompt_tokens + request.emitted, 0, 0
            left -= self.read(request, left)

    def decode(self, request: Request, decoders: int, left: float) -> int:
        """Let a request decode; return the tokens that it takes of those left."""
        self.step.k = self.rule(self.requests_before if self.engine.drafts_ahead else decoders)
        drafted = min(self.step.k, request.asked.limit[request.emitted], request.remaining - 1)
        verified = int(min(drafted, left - 1))
        cached = request.asked.prompt_tokens + request.emitted - 1
        self.step.decoding[request.number] = (drafted, verified, cached, request.behind)
        return 1 + verified

    def read(self, request: Request, left: float) -> int:
        """Prefill a chunk of a request if any tokens are left; return the tokens that it takes."""
        new = int(max(min(request.to_read - request.read, left), 0))
        if new > 0:
            self.step.reading[request.number] = (new, request.read)
        return new

    def takes_memory(self, request: Request) -> bool:
        """Allocate the memory that the request needs now; False if too little is free."""
        asked, block = request.asked, self.engine.block_tokens
        by_now = asked.prompt_tokens + request.emitted + self.longest_k
        needed = math.ceil(by_now / block) if block else asked.prompt_tokens + asked.output_tokens
        free = self.memory - sum(other.held for other in self.admitted if other is not request)
        request.held = needed if needed <= free else request.held
        return needed <= free

    def can_go_on(self, request: Request) -> bool:
        """Allocate memory for a round, preempting the latest admissions if needed; False if it preempted itself."""
        while request in self.admitted and not self.takes_memory(request):
            self.waiting.insert(0, self.admitted.pop())
            self.step.preempted.append(self.waiting[0].number)
        return request in self.admitted

    def end(self, now_s: float) -> list[Request]:
        """Emit the step's tokens; return the requests that are finished, in the order of admission."""
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
    """Serve requests as they arrive, or in a closed loop of `users`. longest_k : draft tokens to allocate blocks for"""
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
