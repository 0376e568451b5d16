"""The compiled step of a server: it selects the requests that decode, are prefilled or wait, and updates their state.

`ServerState` holds all of a server's state, mostly an array entry per request; `Limits` holds constants. Times count
steps: an event at the end of the n-th step has time n, and an event before the first step has time 0.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from specsim.io.arrays import Bools, Ints
from specsim.io.compiled import njit

ACTIVE, HEAD, WAITING, FREE, LEFT, SEEN, NEXT, STEP, PREEMPTED, ROUNDS, CHUNKS = range(11)  # places in `count`
NEVER = -1

# One entry per request, but for the last three fields:
# prompt, output: tokens; emitted, read: tokens so far, read of the prompt (after a preemption, of the output as well)
# end: row of the trace after its text; again: row at which the text starts over if the output is longer
# row: row of the trace of its next round; behind: emitted tokens that the drafter's cache lacks
# verified, accepted: draft tokens so far; held: blocks of the KV cache; reading: whether its prefill is incomplete
# reshaped: whether its output is shorter or longer than recorded
# submitted, started, first, finished: times of submission, admission, first token and end
# active: admitted requests in the order of admission; waiting: ring buffer of waiting requests; count: see above
ServerState = namedtuple(
    "ServerState",
    "prompt output end again emitted read row behind verified accepted held reading reshaped submitted started "
    "first finished active waiting count",
)

# `step` to `cached` have a row per round, `read_step` to `put_out` one per prompt chunk, `speculates` one per step.
# cached, before: tokens in the KV cache; new: tokens of the chunk; put_out: 1 if the chunk completes its prompt, else 0
StepLog = namedtuple(
    "StepLog",
    "step request drafted verified accepted emitted behind cached read_step read_request new before put_out speculates",
)

# slots: most requests of a batch; step_tokens: token budget of a step; block_tokens: 0 reserves whole requests
# mixes, cuts, ahead (drafts_ahead): see `ServerRules`; longest: tokens of the longest draft
# kept: tokens of the budget that are reserved per request; width: tokens of a pass for each pending or verified token
# whole: whether drafts cannot be shortened; closed: whether each answered request is followed by the next one (users)
# level_end: of a static tree, see `Links`; empty for chains
Limits = namedtuple(
    "Limits", "slots step_tokens block_tokens mixes cuts ahead longest kept width whole closed level_end"
)

compiled: Any = njit(nogil=True, error_model="numpy")
# For functions that run once a round: passing all of the arrays to a call takes longer than their work.
inlined: Any = njit(nogil=True, error_model="numpy", inline="always")


@inlined
def _levels_of(level_end: Ints, drafted: int) -> int:
    """Number of draft passes: one per token of a chain, one per level of a tree; `draft_levels` of one draft."""
    return int(np.searchsorted(level_end - 1, drafted)) if len(level_end) else drafted


@compiled
def submit(state: Any, request: int) -> None:
    """Append a request to the end of the queue."""
    count = state.count
    state.waiting[(count[HEAD] + count[WAITING]) % len(state.waiting)] = request
    count[WAITING] += 1
    state.submitted[request] = count[STEP]


@compiled
def _lacks(state: Any, limits: Any, request: int, tokens: int) -> int:
    """Blocks of the KV cache that a request has yet to take for so many tokens; a block is a token without blocks."""
    return -(-tokens // max(limits.block_tokens, 1)) - state.held[request]


@compiled
def _hold(state: Any, limits: Any, request: int, tokens: int) -> bool:
    """Allocate KV blocks to a request until it holds so many tokens; False, and no change, if too few are free."""
    more = _lacks(state, limits, request, tokens)
    if more > state.count[FREE]:
        return False
    if more > 0:
        state.count[FREE] -= more
        state.held[request] += more
    return True


@compiled
def _needed(state: Any, limits: Any, request: int) -> int:
    """Tokens of KV memory that a request has to hold: up to the end of its next round, or of its whole output."""
    if limits.block_tokens:
        return state.prompt[request] + state.emitted[request] + limits.longest
    return state.prompt[request] + state.output[request]


@compiled
def _fits(state: Any, limits: Any) -> bool:
    """Whether the first request of the queue can be admitted. No later request is admitted before it."""
    if not state.count[WAITING] or state.count[ACTIVE] >= limits.slots:
        return False
    request = state.waiting[state.count[HEAD]]
    return _lacks(state, limits, request, _needed(state, limits, request)) <= state.count[FREE]


@compiled
def _preempt(state: Any) -> None:
    """Preempt the request that was admitted last: it releases its memory and becomes the first of the queue."""
    count = state.count
    count[ACTIVE] -= 1
    last = state.active[count[ACTIVE]]
    count[FREE] += state.held[last]
    state.held[last] = state.read[last] = 0
    count[HEAD] = (count[HEAD] - 1) % len(state.waiting)
    state.waiting[count[HEAD]] = last
    count[WAITING] += 1
    count[PREEMPTED] += 1


@compiled
def decoding(state: Any, limits: Any) -> Ints:
    """Requests that can decode a round in the next step, in the order of admission."""
    found = np.empty(state.count[ACTIVE], dtype=np.int64)
    size = 0
    for i in range(len(found)):
        if not state.reading[state.active[i]]:
            found[size] = state.active[i]
            size += 1
    if not limits.mixes and (size < len(found) or _fits(state, limits)):
        size = 0
    return found[:size]


@compiled
def _read(state: Any, log: Any, request: int, room: int, kept: int) -> int:
    """Prefill a chunk of a request's prompt in this step; return the tokens of the budget that are left."""
    whole = state.prompt[request] + state.emitted[request]  # after a preemption, its output as well
    new = min(whole - state.read[request], room - kept)
    at = state.count[CHUNKS]
    log.read_step[at], log.read_request[at] = state.count[STEP], request
    log.new[at], log.before[at] = new, state.read[request]
    state.count[CHUNKS] += 1
    state.read[request] += new
    return room - new - kept


@compiled
def fill(state: Any, limits: Any, log: Any, now: Ints, verified: Ints, part: Bools) -> None:
    """Fill a step: select which of `now` decode, prefill chunks of prompts, and admit requests.

    now : [R], as `decoding` returned them
    verified : [R], drafted tokens to verify, which this function lowers where the budget binds
    part : [R], output: whether each of `now` decodes in this step
    """
    count = state.count
    room = limits.step_tokens
    preempted = count[PREEMPTED]
    part[:] = False
    chunks = count[CHUNKS]
    both = limits.mixes or not len(now)  # whether the step reads prompts at all
    if not limits.cuts:
        for i in range(len(now)):
            fits = not limits.block_tokens or (state.held[now[i]] and _make_room(state, limits, now[i]))
            if not fits:  # it was preempted, and so were all that were admitted after it
                break
            part[i] = True
            room -= (1 + verified[i]) * limits.width * limits.mixes
    i = at = 0
    while i < count[ACTIVE] and room > limits.kept:
        request = state.active[i]
        i += 1
        if state.reading[request]:
            room = _read(state, log, request, room, limits.kept)
        elif limits.cuts:
            most = (room - limits.kept) // limits.width - 1
            if most < 0 or (limits.whole and most < verified[at]):
                break
            if limits.block_tokens and not _make_room(state, limits, request):
                break
            verified[at], part[at] = min(verified[at], most), True
            room -= (1 + verified[at]) * limits.width + limits.kept
            at += 1
    if both and count[PREEMPTED] == preempted:
        while room > limits.kept and _fits(state, limits):
            request = state.waiting[count[HEAD]]
            _hold(state, limits, request, _needed(state, limits, request))
            count[HEAD] = (count[HEAD] + 1) % len(state.waiting)
            count[WAITING] -= 1
            state.active[count[ACTIVE]] = request
            count[ACTIVE] += 1
            state.reading[request] = True
            if state.started[request] == NEVER:
                state.started[request] = count[STEP]
            room = _read(state, log, request, room, limits.kept)
    count[SEEN] = part.sum() + count[CHUNKS] - chunks


@compiled
def _make_room(state: Any, limits: Any, request: int) -> bool:
    """Allocate the memory of a request's round, preempting others if need be; False if it was preempted itself."""
    while not _hold(state, limits, request, _needed(state, limits, request)):
        last = state.active[state.count[ACTIVE] - 1]
        _preempt(state)
        if last == request:
            return False
    return True


@compiled
def finish(
    state: Any,
    limits: Any,
    log: Any,
    now: Ints,
    part: Bools,
    k: Ints,
    drafted: Ints,
    verified: Ints,
    match: Ints,
    leaf: Bools,
) -> None:
    """Decode and log the rounds of a step that `fill` has filled, and let requests that are complete leave.

    now, part, verified : [R], as in `fill`; drafted : [R], tokens; k : [R], draft length that the rule chose
    match : [R], tokens of the whole draft that would be accepted
    leaf : [R], whether the accepted path of a tree ends at a leaf
    """
    count = state.count
    step = count[STEP]
    speculates = False
    for i in range(len(now)):
        if not part[i]:
            continue
        request, at = now[i], count[ROUNDS]
        accepted = min(match[i], _levels_of(limits.level_end, verified[i]))
        emitted = min(accepted + 1, state.output[request] - state.emitted[request])
        log.step[at], log.request[at] = step, request
        log.drafted[at], log.verified[at], log.accepted[at] = drafted[i], verified[i], accepted
        log.emitted[at], log.behind[at] = emitted, state.behind[request]
        log.cached[at] = state.prompt[request] + state.emitted[request] - 1
        count[ROUNDS] += 1
        speculates |= k[i] > 0
        if limits.width > 1:
            state.behind[request] = 0
        elif k[i] == 0:
            state.behind[request] += 1
        else:
            whole = drafted[i] > 0 and _levels_of(limits.level_end, drafted[i]) == accepted
            state.behind[request] = whole or (accepted > 0 and leaf[i])
        state.verified[request] += verified[i]
        state.accepted[request] += accepted
        _emit(state, request, emitted)
    log.speculates[step] = speculates
    count[STEP] += 1
    first = count[CHUNKS]
    while first > 0 and log.read_step[first - 1] == step:
        first -= 1
    for at in range(first, count[CHUNKS]):
        request = log.read_request[at]
        log.put_out[at] = 0
        if state.reading[request] and state.read[request] == state.prompt[request] + state.emitted[request]:
            state.reading[request], state.behind[request] = False, 0
            if state.first[request] == NEVER:
                state.first[request] = count[STEP]
            _emit(state, request, 1)
            log.put_out[at] = 1
    left = 0
    for i in range(count[ACTIVE]):
        request = state.active[i]
        if state.emitted[request] < state.output[request]:
            state.active[left] = request
            left += 1
            continue
        state.finished[request] = count[STEP]
        count[FREE] += state.held[request]
        state.held[request] = 0
        count[LEFT] -= 1
        if limits.closed and count[NEXT] < len(state.prompt):
            submit(state, count[NEXT])
            count[NEXT] += 1
    count[ACTIVE] = left


@inlined
def _emit(state: Any, request: int, tokens: int) -> None:
    """Emit tokens of a request; beyond the recorded text, its rounds start over at row `again` of the trace."""
    state.emitted[request] += tokens
    state.row[request] += tokens
    if state.row[request] >= state.end[request]:
        state.row[request] = state.again[request]


@inlined
def _within(limits: Any, drafted: int, tokens: int) -> int:
    """Limit a draft to so many tokens of output; a tree is limited to whole levels."""
    if not len(limits.level_end):
        return min(drafted, tokens)
    return min(drafted, limits.level_end[min(tokens, len(limits.level_end) - 1)] - 1)


@compiled
def run_steps(
    state: Any, limits: Any, log: Any, lengths: Ints, draft_limit: Any, match_len: Any, leaf: Bools, until: int
) -> None:
    """Serve under a schedule of K by batch, until step `until`, the last request, or a full log.

    lengths : K by batch, from a batch of 0 sequences; the last entry holds for all larger batches
    draft_limit, match_len : by row of the trace, most tokens of a draft, and drafted tokens that would be accepted
    leaf : by row, whether the accepted path of a tree ends at a leaf; empty for chains
    """
    count = state.count
    columns = np.empty((5, limits.slots), dtype=np.int64)  # allocated once: an allocation takes longer than a round
    flags = np.empty((2, limits.slots), dtype=np.bool_)
    while count[LEFT] and count[STEP] < until and _has_room(state, limits, log):
        running = decoding(state, limits)
        size = len(running)
        now, k, drafted, verified, match = (
            columns[0, :size], columns[1, :size], columns[2, :size], columns[3, :size], columns[4, :size]
        )  # fmt: skip
        part, ends = flags[0, :size], flags[1, :size]
        seen = count[SEEN] if limits.ahead and count[SEEN] else size
        k[:] = lengths[min(seen, len(lengths) - 1)]
        for i in range(size):
            request = running[i]
            row = state.row[request]
            now[i] = request
            drafted[i] = min(k[i], np.int64(draft_limit[row]))
            if state.reshaped[request]:
                drafted[i] = _within(limits, drafted[i], state.output[request] - state.emitted[request] - 1)
            verified[i] = drafted[i]
            match[i] = np.int64(match_len[row])
            ends[i] = leaf[row] if len(leaf) else False
        fill(state, limits, log, now, verified, part)
        finish(state, limits, log, now, part, k, drafted, verified, match, ends)


def has_room(state: Any, limits: Any, log: Any) -> bool:
    """Whether the log has enough empty rows for another step."""
    count, slots = state.count, limits.slots
    fits = count[ROUNDS] + slots <= len(log.step) and count[CHUNKS] + slots <= len(log.read_step)
    return bool(fits and count[STEP] < len(log.speculates))


_has_room: Any = compiled(has_room)
