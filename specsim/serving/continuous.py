"""Continuous batching: requests join and leave the batch between rounds, as in serving engines.

In each step the engine decodes a round of requests whose prefill is complete, and prefills others, whole or in chunks
within a token budget. Engines differ in which requests take part, see `specsim.serving.presets`. The pass that ends a
prefill emits the first output token. By default a request reserves KV memory for its prompt and its whole output, so
that none is preempted. With blocks, as in vLLM, it takes memory as it needs it: where no block is free, the request
that was admitted last releases its blocks, and computes its prompt and output again after it is readmitted.

With a fixed number of users, no decision depends on time, so the seconds of all steps are computed together at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specsim.cost.batches import BatchCost
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.serving import steps as compiled
from specsim.serving.arrivals import Requests
from specsim.serving.costs import Prompts, round_seconds
from specsim.serving.draft_length import DraftRounds, Running, ScheduledK
from specsim.serving.drafts import Drafts
from specsim.serving.presets import ServerRules, find_server

ROUNDS_AT_ONCE = 1 << 16  # whose seconds are computed together
UNLIMITED = 1 << 60  # steps, or tokens of KV memory


class Step(NamedTuple):
    """A step of the engine that ended at `end_s`.

    sequences, prompts : numbers of requests that decoded a round, and that were prefilled
    tokens, cached_tokens : new tokens of the target's forward pass, and tokens that the KV cache held before it
    output_tokens : tokens emitted in the step; prefill_output, those among them that prefills emitted
    drafted, verified, accepted : draft tokens of the rounds
    """

    end_s: float
    seconds: float
    sequences: int
    prompts: int
    tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_output: int
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
    server: str | ServerRules = "vllm",
    kv_tokens: int | None = None,
    users: int | None = None,
    step_tokens: int | None = None,
    block_tokens: int | None = None,
) -> ServingRun:
    """Serve requests by continuous batching.

    drafts : drafts of every sequence after its first token, see `drafts_of` with `served`
    cost : seconds of passes over batches
    requests : requests and their arrival times
    slots : most sequences of a batch
    server : the engine whose scheduler is simulated, see `specsim.serving.presets`
    kv_tokens : tokens that the KV cache holds; default: unlimited
    users : closed loop: number of users, each of whom sends the next request as soon as the last is answered
    step_tokens : most tokens of a step's target pass; default: the engine's
    block_tokens : tokens of a block of the KV cache, which requests take as they need them; default: a request
        reserves its whole length

    Raises InputError for no slot, no user, no token of a step or block, for drafts that cannot be cut and are longer
    than a step, and for a request that the cache can never hold.
    """
    rules = find_server(server) if isinstance(server, str) else server
    sizes = {"slots": slots, "users": users, "step_tokens": step_tokens, "block_tokens": block_tokens}
    if any(size is not None and size < 1 for size in sizes.values()):
        named = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        raise InputError(f"{named}; give at least 1 of each")
    longest = drafts.rule.max_draft_tokens
    largest = int((requests.prompt_tokens + requests.output_tokens).max())
    if block_tokens is not None:  # and room for the longest draft, which may be rejected
        largest = block_tokens * -(-(largest + longest) // block_tokens)
    if kv_tokens is not None and largest > kv_tokens:
        raise InputError(
            f"a request of {largest} tokens, prompt and output, never fits in a cache of {kv_tokens}; raise kv_tokens"
        )
    budget = rules.step_tokens if step_tokens is None else step_tokens
    whole, width = drafts.rows is not None, 1 + drafts.masks
    kept = rules.keeps.get(str(drafts.trace.drafter_kind), 0) if longest else 0
    least = kept + ((1 + int(drafts.limit.max(initial=0))) * width if whole and rules.cuts else 1)
    if least > budget:
        raise InputError(
            f"step_tokens={budget}: {drafts.label} needs {least} tokens for a request; give at least as many"
        )
    limits = compiled.Limits(
        slots=slots,
        step_tokens=budget,
        block_tokens=block_tokens or 0,
        mixes=rules.mixes,
        cuts=rules.cuts,
        ahead=rules.drafts_ahead,
        longest=longest,
        kept=kept,
        width=width,
        whole=whole,
        closed=users is not None,
        level_end=np.empty(0, dtype=np.int64) if drafts.tree is None else drafts.tree.level_end.astype(np.int64),
    )
    blocks = (kv_tokens or UNLIMITED) // (block_tokens or 1)
    return _Server(drafts, cost, requests, limits, blocks, users).run()


class _Server:
    """A run of the server: its compiled state, its log, and what the rule has learned."""

    def __init__(
        self, drafts: Drafts, cost: BatchCost, requests: Requests, limits: Any, blocks: int, users: int | None
    ) -> None:
        self.drafts, self.cost, self.requests, self.limits = drafts, cost, requests, limits
        self.rule = drafts.rule
        self.learned = self.rule.initial_state()
        self.state, self.log = _initial_state(drafts, requests, limits, blocks), _empty_log(requests, limits)
        self.count = self.state.count
        self.begin_s: list[float] = []  # of steps, where they depend on arrivals
        self.end_s: list[float] = []
        self.took_s: list[float] = []
        for request in range(min(users or 0, len(requests))):
            compiled.submit(self.state, request)
            self.count[compiled.NEXT] += 1

    def run(self) -> ServingRun:
        """Serve all requests."""
        while self.count[compiled.LEFT]:
            if not compiled.has_room(self.state, self.limits, self.log):
                self.log = _longer(self.log)
            if self.limits.closed:
                self._steps(UNLIMITED)
            else:
                self._arrive()
                self._steps(int(self.count[compiled.STEP]) + 1)
                self._wait()
        return self._result()

    def _arrive(self) -> None:
        """Submit the requests that have arrived by now; an idle server waits for the next arrival."""
        arrival_s, following = self.requests.arrival_s, int(self.count[compiled.NEXT])
        now_s = self.end_s[-1] if self.end_s else 0.0
        if not self.count[compiled.ACTIVE] and not self.count[compiled.WAITING]:
            now_s = max(now_s, float(arrival_s[following]))
        arrived = int(np.searchsorted(arrival_s, now_s, side="right"))
        for request in range(following, arrived):
            compiled.submit(self.state, request)
        self.count[compiled.NEXT] = arrived
        self.begin_s.append(now_s)

    def _wait(self) -> None:
        last = len(self.begin_s) - 1
        self.took_s.append(float(self._seconds(last, last + 1)[0]))
        self.end_s.append(self.begin_s[-1] + self.took_s[-1])

    def _steps(self, until: int) -> None:
        """Take steps up to this number, or until the log is full; just one step if the rule is not compiled."""
        drafts = self.drafts
        if type(self.rule) is ScheduledK and type(drafts) is Drafts:
            lengths = np.array([0, *(self.rule.at(size) for size in range(1, self.limits.slots + 1))])
            leaf = np.empty(0, dtype=np.bool_) if drafts.leaf is None else drafts.leaf
            compiled.run_steps(
                self.state, self.limits, self.log, lengths, drafts.limit, drafts.match, leaf, np.int64(until)
            )
        else:
            self._step()

    def _step(self) -> None:
        state, rounds = self.state, int(self.count[compiled.ROUNDS])
        now = compiled.decoding(state, self.limits)
        asked = self._known(now)
        sequence = self.requests.sequence[now]
        draft = self.drafts.propose(self.learned, asked, sequence, state.row[now], state.reshaped[now])
        ends = np.zeros(len(now), dtype=np.bool_)
        verified = np.array(draft.verified)
        read = int(self.count[compiled.CHUNKS])
        part = np.empty(len(now), dtype=np.bool_)
        compiled.fill(state, self.limits, self.log, now, verified, part)
        if draft.survival is not None and self.rule.trims_filled_steps and part.any():
            known = self._with_prompts(asked.select(part), read)
            fewer = self.rule.verify(self.learned, known, draft.survival[part], verified[part])
            verified[part] = np.minimum(fewer, verified[part])
        compiled.finish(state, self.limits, self.log, now, part, draft.k, draft.drafted, verified, draft.match, ends)
        if part.any():
            known = asked if part.all() else asked.select(part)
            log, own = self.log, slice(rounds, int(self.count[compiled.ROUNDS]))
            turn = DraftRounds(
                log.drafted[own],
                log.verified[own],
                log.accepted[own],
                log.emitted[own],
                state.behind[known.request],
                state.row[known.request],
                bool(draft.k[part].any()),
                None if draft.survival is None else draft.survival[part],
            )
            self.learned = self.rule.update(self.learned, known, turn)

    def _known(self, now: Ints) -> Running:
        """What the rule may know of the requests that may decode."""
        state = self.state
        emitted = state.emitted[now]
        seen = int(self.count[compiled.SEEN]) if self.limits.ahead else 0
        return Running(
            now,
            state.prompt[now] + emitted - 1,
            state.output[now] - emitted,
            state.verified[now],
            state.accepted[now],
            state.behind[now],
            seen or len(now),
        )

    def _with_prompts(self, running: Running, first: int) -> Running:
        """What the rule may know once the step is filled, including its prefills. first : their first row in the log"""
        log, state, own = self.log, self.state, slice(first, int(self.count[compiled.CHUNKS]))
        request = log.read_request[own]
        ends = state.read[request] == state.prompt[request] + state.emitted[request]
        return running._replace(
            prompts=len(request), prompt_tokens=int(log.new[own].sum()), prompts_ending=int(ends.sum())
        )

    def _seconds(self, first: int, last: int) -> Floats:
        log = self.log
        own = slice(*np.searchsorted(log.step[: self.count[compiled.ROUNDS]], [first, last]))
        read = slice(*np.searchsorted(log.read_step[: self.count[compiled.CHUNKS]], [first, last]))
        names = ("step", "drafted", "verified", "behind", "cached")
        step, drafted, verified, behind, cached = (getattr(log, name)[own].astype(np.int64) for name in names)
        read_step, new, before = (getattr(log, name)[read].astype(np.int64) for name in ("read_step", "new", "before"))
        drafter = self.rule.max_draft_tokens > 0 and not self.drafts.masks
        return round_seconds(
            self.cost,
            step - first,
            drafted,
            behind,
            cached,
            log.speculates[step],
            self.drafts.tree,
            verified,
            Prompts(read_step - first, new, before, drafter) if len(new) else None,
            self.drafts.masks,
        ).total_s

    def _result(self) -> ServingRun:
        state, log, count = self.state, self.log, int(self.count[compiled.STEP])
        if self.limits.closed:
            at_once = max(1, ROUNDS_AT_ONCE // self.limits.slots)
            parts = [self._seconds(first, min(first + at_once, count)) for first in range(0, count, at_once)]
            seconds = np.concatenate(parts)
            end_s = np.cumsum(seconds)
            begin_s = end_s - seconds
            submitted_s = np.append(0.0, end_s)[state.submitted]
            begin_s[1:] = end_s[:-1]
        else:
            begin_s, end_s = np.array(self.begin_s), np.array(self.end_s)
            seconds, submitted_s = np.array(self.took_s), self.requests.arrival_s
        rounds = {name: getattr(log, name)[: self.count[compiled.ROUNDS]] for name in RequestRound._fields}
        read = slice(0, self.count[compiled.CHUNKS])

        def by_step(step: Ints, values: Any = None) -> Ints:
            return np.bincount(step, values, minlength=count).astype(np.int64)

        step, masked = rounds["step"], 1 + self.drafts.masks
        sequences = by_step(step)
        verified, read_step = by_step(step, rounds["verified"]), log.read_step[read]
        cached = by_step(step, log.cached[: len(step)]) + by_step(read_step, log.before[read])
        prefill_output = by_step(read_step, log.put_out[read])
        emitted = by_step(step, log.emitted[: len(step)])
        columns: dict[str, Ints | Floats] = {
            "end_s": end_s,
            "seconds": seconds,
            "sequences": sequences,
            "prompts": by_step(read_step),
            "tokens": (sequences + verified) * masked + by_step(read_step, log.new[read]),
            "cached_tokens": cached,
            "output_tokens": emitted + prefill_output,
            "prefill_output": prefill_output,
            "drafted": by_step(step, rounds["drafted"]),
            "verified": verified,
            "accepted": by_step(step, rounds["accepted"]),
        }
        return ServingRun(
            self.drafts.label,
            self.requests,
            submitted_s,
            begin_s[state.started],
            end_s[state.first - 1],
            end_s[state.finished - 1],
            {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()},
            rounds,
            int(self.count[compiled.PREEMPTED]),
        )


def _initial_state(drafts: Drafts, requests: Requests, limits: Any, blocks: int) -> Any:
    """Return a server's state before the first request is submitted."""
    offsets, sequence = drafts.trace.offsets.astype(np.int64), requests.sequence
    begin, end = offsets[sequence], offsets[sequence + 1]
    zeros = {name: np.zeros(len(requests), dtype=np.int64) for name in compiled.ServerState._fields}
    count = np.zeros(compiled.CHUNKS + 1, dtype=np.int64)
    count[compiled.FREE], count[compiled.LEFT] = blocks, len(requests)
    own = {
        "prompt": requests.prompt_tokens.astype(np.int64),
        "output": requests.output_tokens.astype(np.int64),
        "end": end,
        "again": np.minimum(begin + 1, end - 1),
        "row": begin.copy(),
        "reading": np.zeros(len(requests), dtype=np.bool_),
        # A text of another length than recorded ends where the request says, and drafts no further.
        "reshaped": requests.output_tokens != drafts.trace.output_tokens[sequence],
        "active": np.zeros(limits.slots, dtype=np.int64),
        "count": count,
        **{name: np.full(len(requests), compiled.NEVER) for name in ("started", "first", "finished")},
    }
    return compiled.ServerState(**{**zeros, **own})


def _empty_log(requests: Requests, limits: Any) -> Any:
    """Return a log with room for all rounds; the operating system provides only the pages that are written."""
    rows = int(requests.output_tokens.sum()) + limits.slots + 1
    columns = {name: np.empty(rows, dtype=np.int32) for name in compiled.StepLog._fields}
    return compiled.StepLog(**{**columns, "speculates": np.empty(rows, dtype=np.bool_)})


def _longer(log: Any) -> Any:
    """Return a copy of the log with twice as many rows."""
    return compiled.StepLog(*(np.concatenate([column, np.empty_like(column)]) for column in log))
