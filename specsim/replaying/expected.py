"""The exact expectation of a replay over a policy's draws.

Beside the sampled `specsim.replaying.replay.replay`, whose mean over many seeds this is. It is made in two
parts: how likely a round starts at a position and drafts at least j tokens (a forward
programme over positions), and what that costs, which is linear in these probabilities.
"""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np

from specsim.cost.table import CostTable, autoregressive_seconds
from specsim.io.arrays import Array, Floats
from specsim.io.errors import InputError
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.replaying.chain import or_unread
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.replay import Replay, eq14_ratio, replay
from specsim.trace.trace import Trace

MAX_CELLS = 2**26  # of the programme's table, 8 bytes each
NEGLIGIBLE = 1e-20  # a chance left out; a billion of them still leave a sequence's expectations right to 1e-11


def expected_replay(trace: Trace, policy: ChainPolicy, table: CostTable) -> Replay:
    """What `replay` returns in the mean over all seeds, with counts as floats.

    Exact up to rounding for policies that draw nothing, whose replay it is, and for policies with
    `keep_probability` (see `specsim.policy.estimates.counts`) whose state starts anew with every sequence. For those,
    memory grows with the square of a sequence's length and time somewhat faster. Raises InputError
    where the expectation is not to be had.
    """
    check_replayable(trace, policy)
    check_covered(trace, policy, table)
    if not draws_uniforms(type(policy)):
        result = replay(trace, policy, table)
        counts = {name: getattr(result, name).astype(np.float64) for name in _COUNTS}
        return dataclasses.replace(result, **counts)
    if policy.drops_refused:
        raise InputError(f"policy {policy} drops drafted tokens, which is not averaged over what is drawn; replay it")
    match = (trace.match_len[:, None] >= np.arange(policy.max_draft_tokens + 1)).astype(np.float64)
    return _expected_costs(trace, policy, table, match, _reached_by_counts(trace, policy, match))


_COUNTS = ("num_rounds", "drafted", "accepted", "policy_steps", "verified")


def draws_uniforms(kind: type[ChainPolicy]) -> bool:
    """Whether this kind's keep_drafting ever reads its last argument, the uniform."""
    code = kind.keep_drafting.py_func.__code__  # type: ignore[attr-defined]
    name = code.co_varnames[code.co_argcount - 1]
    named = (i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in dis.get_instructions(code))
    return any(name in names for names in named)


def _columns(trace: Trace) -> tuple[Any, ...]:
    """The columns of a `Step`."""
    optional = (or_unread(trace, column) for column in (trace.score, trace.top10_confidence))
    return trace.prob, trace.confidence, trace.entropy_nats, *optional


@nb.njit
def _step(columns, row, depth):  # type: ignore[no-untyped-def]
    prob, confidence, entropy_nats, score, top10_confidence = columns
    return Step(
        np.float64(prob[row, depth - 1]),
        np.float64(confidence[row, depth - 1]),
        np.float64(entropy_nats[row, depth - 1]),
        np.float64(score[row, depth - 1]),
        np.float64(top10_confidence[row, depth - 1]),
    )


def _reached_by_counts(trace: Trace, policy: ChainPolicy, match: Floats) -> Floats:
    """`reached` of a policy that knows the past by its counts only, or InputError."""
    keep_probability: Callable[..., float] | None = getattr(policy, "keep_probability", None)
    if keep_probability is None:
        raise InputError(
            f"policy {policy} is random and defines no keep_probability, so its expectation is not available; "
            "leave out --expected"
        )
    if policy.carries_state:
        raise InputError(
            f"policy {policy} keeps its state from sequence to sequence, which cannot be averaged; replay it"
        )
    misses = 2 if policy.settings.get("counting") == "printed" else 1
    length = int(trace.output_tokens.max())
    if _cells(length, match.shape[1] - 1, misses) > MAX_CELLS:
        longest = int(np.sqrt(MAX_CELLS / (match.shape[1] + 1) / misses)) - 2
        raise InputError(
            f"a sequence of {length} tokens is too long to average {policy} exactly, "
            f"about {longest} fit in memory; replay it with several seeds"
        )
    reached = np.zeros((len(trace.token), policy.max_draft_tokens + 2))
    layers = np.zeros(_shape(length, match.shape[1] - 1, misses))
    _reach_by_counts(
        keep_probability,
        policy.params,
        misses,
        trace.offsets,
        trace.draft_limit,
        match,
        _columns(trace),
        layers,
        reached,
    )
    return reached


def _shape(length: int, longest: int, misses: int) -> tuple[int, int, int]:
    """Positions ahead, rounds, and trials that failed, of the programme's table."""
    return longest + 2, length + 1, misses * length + 1


def _cells(length: int, longest: int, misses: int) -> int:
    return int(np.prod([float(size) for size in _shape(length, longest, misses)]))


@nb.njit
def _add(layers, window, position, rounds, failed, prob):  # type: ignore[no-untyped-def]
    """Add the probability of a state, if it counts, and widen its layer's window."""
    if prob < NEGLIGIBLE:
        return
    layer = position % layers.shape[0]
    layers[layer, rounds, failed] += prob
    seen = window[layer]
    seen[0], seen[1] = min(seen[0], rounds), max(seen[1], rounds)
    seen[2], seen[3] = min(seen[2], failed), max(seen[3], failed)


@nb.njit(nogil=True)
def _reach_by_counts(  # type: ignore[no-untyped-def]
    keep_probability, params, misses, offsets, draft_limit, match, columns, layers, reached
):
    """Fill `reached`, forward over states (position t, rounds m, trials failed f), each with its probability.

    Every earlier round emitted a token more than it accepted, so r = t - m, and n = r + f. Rounds that had
    nothing to draft count in m: Cali-TS, which alone reads it, has scores, and their drafters always draft.
    A round fails no trial, a single trial, or, counted as printed and drafted past, two (`misses`). Layer
    t % len(layers) holds the states at t, within its window (least and most m, least and
    most f); layers come in empty and are left so.
    """
    longest = match.shape[1] - 1
    nothing = np.array([layers.shape[1], -1, layers.shape[2], -1])
    window = np.empty((layers.shape[0], 4), dtype=np.int64)
    at_least = np.empty(longest + 3)
    for s in range(len(offsets) - 1):
        length = offsets[s + 1] - offsets[s]
        window[:] = nothing
        if length > 0:
            _add(layers, window, 0, 0, 0, 1.0)
        for t in range(length):
            row, layer = offsets[s] + t, t % layers.shape[0]
            limit = min(longest, np.int64(draft_limit[row]))
            low_m, high_m, low_f, high_f = window[layer]
            window[layer] = nothing
            for m in range(low_m, high_m + 1):
                for f in range(low_f, high_f + 1):
                    prob = layers[layer, m, f]
                    if prob == 0.0:
                        continue
                    layers[layer, m, f] = 0.0
                    reached[row, 0] += prob
                    if limit == 0:  # nothing is drafted, and the state learns nothing
                        if t + 1 < length:
                            _add(layers, window, t + 1, m + 1, f, prob)
                        continue
                    counts = (np.float64(t - m), np.float64(t - m + f), np.float64(m))
                    at_least[:] = 0.0
                    at_least[0] = at_least[1] = prob
                    for depth in range(1, limit):
                        if at_least[depth] < NEGLIGIBLE:
                            break
                        step = _step(columns, row, depth)
                        at_least[depth + 1] = at_least[depth] * keep_probability(counts, params, step, depth)
                    for depth in range(1, limit + 1):
                        reached[row, depth] += at_least[depth]
                    for accepted in range(min(limit + 1, length - t - 1)):
                        after, more = t + accepted + 1, at_least[accepted + 1]
                        all_of_them = (at_least[accepted] - more) * match[row, accepted]
                        _add(layers, window, after, m + 1, f, all_of_them)
                        if accepted == limit:
                            break
                        miss = match[row, accepted] - match[row, accepted + 1]
                        past = at_least[accepted + 2] if misses == 2 else 0.0
                        _add(layers, window, after, m + 1, f + 1, miss * (more - past))
                        _add(layers, window, after, m + 1, f + misses, miss * past)


def _expected_costs(trace: Trace, policy: ChainPolicy, table: CostTable, match: Floats, reached: Floats) -> Replay:
    """The replay of these probabilities.

    match : [N, K + 1], 1 where at least j tokens match, else 0
    reached : [N, K + 2], probability that a round starts at a row and drafts at least j tokens
    """
    longest = match.shape[1] - 1
    sequence = np.repeat(np.arange(trace.sequences), trace.output_tokens)
    position = trace.position
    bucket = (trace.prompt_tokens[sequence] - 1 + position) >> table.bucket_bits

    def total(values: Floats) -> Floats:
        return np.bincount(sequence, weights=values, minlength=trace.sequences).astype(np.float64)

    at_least, exactly = reached[:, 1:-1], reached[:, :-1] - reached[:, 1:]
    drafted = at_least.sum(axis=1)
    decides = np.arange(1, longest + 1) < trace.draft_limit[:, None]
    decides[:, -1] = False
    asked = np.where(decides, at_least, 0.0).sum(axis=1)
    # After a fully accepted draft, the next round's first step catches up on a token.
    behind = np.zeros(len(drafted))
    for depth in range(1, longest + 1):
        arrives = exactly[: -depth - 1, depth] * match[: -depth - 1, depth]
        behind[depth + 1 :] += np.where(position[depth + 1 :] > depth, arrives, 0.0)
    behind[trace.draft_limit == 0] = 0.0
    step_s = np.diff(table.draft_s[: longest + 1, bucket], axis=0).T
    verify_s = table.verify_s[1 : longest + 2, bucket].T
    matched = match[:, 1:].sum(axis=1).astype(np.int64)  # longest accepted prefix, in tokens
    rejected = np.arange(longest + 1) > matched[:, None]
    rejected &= (position + matched + 1 < trace.output_tokens[sequence])[:, None]  # the last round restores no states
    again = np.minimum(matched + 1, longest)
    verify_s = verify_s + rejected * table.refeed_s[again, bucket][:, None]
    rounds, steps = total(reached[:, 0]), total(asked)
    seconds = [
        total((at_least * step_s).sum(axis=1) + behind * table.catch_up_s[bucket]),
        steps * table.policy_step_s,
        total((exactly * verify_s).sum(axis=1)),
        rounds * table.round_overhead_s,
    ]
    expected: dict[str, Array] = {
        "num_rounds": rounds,
        "drafted": total(drafted),
        "accepted": total((at_least * match[:, 1:]).sum(axis=1)),
        "policy_steps": steps,
        "verified": total(drafted),
    }
    return Replay(
        policy=policy,
        output_tokens=trace.output_tokens.astype(np.int64),
        seconds=np.stack(seconds, axis=1),
        autoregressive_s=autoregressive_seconds(trace, table),
        rounds=None,
        cost_notes=table.notes,
        cost_ratio=eq14_ratio(policy, table),
        **expected,
    )
