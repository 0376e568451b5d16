"""A recorded trace as an engine with other conventions would run it, so that any policy replays."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import Counters, Rounds
from specsim.engines.conventions import Conventions
from specsim.io.arrays import IntArray, Ints
from specsim.io.errors import InputError
from specsim.replaying.rounds import RoundLog
from specsim.trace.joined import LOOKUP, SUFFIX, JoinedTrace
from specsim.trace.trace import NO_TOKEN, OPTIONAL_LISTS, STEP_LISTS, Trace

ROWS = ("token", "match_len", *STEP_LISTS, *OPTIONAL_LISTS)


class EngineTrace(NamedTuple):
    """A trace whose replay equals an engine's run.

    trace : its rounds are the engine's: without the tokens that the prompt's pass emits, and with drafts as long as the
        engine makes them. For replays alone, as its drafts may reach beyond the output
    cut_off : sequences whose last round may accept tokens beyond the limit, or behind an end of text, that the
        recording does not reach; 0 where the engine does not count these, or the recording goes on there by the longest
        draft
    """

    trace: Trace
    cut_off: int


def as_engine(trace: Trace, conventions: Conventions, *, max_output_tokens: int | None = None) -> EngineTrace:
    """Convert a trace to what an engine with these conventions would run.

    trace : of chains; a record of trees is left behind. It may go on behind an end of text, where no output is
    conventions : of the engine, see `specsim.engines.conventions.CONVENTIONS`
    max_output_tokens : the engine's limit on output tokens; default: the recording's. Some engines count
        tokens accepted beyond it, so that a recording of this many tokens and the longest draft replays all of their
        counts, unless a text ends before

    Raises InputError for a limit below 1, for a joined trace, and for suffix decoding that drafted from longer outputs
    before.

    >>> import specsim
    >>> from specsim.engines.as_engine import as_engine
    >>> from specsim.engines.conventions import CONVENTIONS
    >>> recorded = specsim.generate(acceptance=0.8, sequences=4, output_tokens=30, depth=8)
    >>> run = as_engine(recorded, CONVENTIONS["vllm"], max_output_tokens=20)
    >>> run.trace.output_tokens.tolist(), run.cut_off
    ([19, 19, 19, 19], 0)
    """
    if isinstance(trace, JoinedTrace):
        raise InputError(
            "engines have a single drafter, but this trace is joined; replay one of its parts as an engine"
        )
    most = int(trace.output_tokens.max(initial=1)) if max_output_tokens is None else max_output_tokens
    if most < 1:
        raise InputError(f"max_output_tokens={most}; give at least 1")
    if _drafts_from_others(trace) and most < trace.output_tokens.max(initial=1):
        raise InputError(
            f"max_output_tokens={most}, and drafts from earlier outputs that are longer; cut the texts there, or use "
            "`specsim record-text --rule suffix --max-cached-requests 1`"
        )
    budget = np.minimum(trace.budget_tokens, most)
    output_tokens = output_lengths(trace, most)
    remaining = np.repeat(output_tokens, trace.output_tokens) - trace.position
    rows = remaining > 0
    match_len, draft_token = trace.match_len, trace.draft_token
    lookup = trace.drafter_kind == LOOKUP
    last_draft = (conventions.lookup_last_draft if lookup else None) or conventions.last_draft
    cut_off = 0
    if conventions.counts_past_end:
        counted = output_tokens + trace.depth
        if last_draft != "K":
            counted = np.minimum(counted, budget)
        cut_off = int((trace.output_tokens < counted).sum())
    else:
        most_accepted = remaining
        if last_draft == "K":  # what matches beyond the limit is drafted and not counted
            room = np.repeat(budget, trace.output_tokens) - trace.position - 1
            most_accepted = np.minimum(remaining, room)
            draft_token = np.where(room[:, None] > 0, draft_token, NO_TOKEN).astype(draft_token.dtype)
        match_len = np.minimum(match_len, np.maximum(most_accepted, 0)).astype(match_len.dtype)
    budget = budget + {"K": trace.depth, "min(K, remaining)": 1, "min(K, remaining - 1)": 0}[last_draft]
    if conventions.first_token == "prefill":
        rows &= trace.position > 0
        budget = budget - 1
    prefilled = int(conventions.first_token == "prefill")
    of_sequence = np.add.reduceat(rows, trace.offsets[:-1], dtype=np.int64)
    changed = dataclasses.replace(trace, match_len=match_len, draft_token=draft_token).with_columns(
        ROWS,
        lambda column: column[rows],
        offsets=np.concatenate([[0], np.cumsum(of_sequence)]).astype(np.int64),
        budget_tokens=budget,
        prompt_tokens=trace.prompt_tokens + prefilled,
        prompt=_prompts(trace, prefilled),
        tree=None,
        meta={**trace.meta, "eos_token_id": None} if conventions.drafts_past_end else trace.meta,
    )
    return EngineTrace(changed, cut_off)


def _drafts_from_others(trace: Trace) -> bool:
    """Whether drafts of a sequence depend on the outputs of earlier sequences."""
    facts = trace.meta.get("drafter_facts", {})
    return trace.drafter_kind == SUFFIX and bool(facts.get("max_cached_requests", 0) > 1)


def output_lengths(trace: Trace, max_output_tokens: int) -> Ints:
    """Tokens that an engine puts out of every sequence [S] under this limit, an end of text included."""
    ends = np.isin(trace.token, trace.eos_token_ids)
    lengths = [
        int(sequence.argmax()) + 1 if sequence.any() else len(sequence)
        for sequence in np.split(ends, trace.offsets[1:-1])
    ]
    return np.minimum(lengths, max_output_tokens)


def _prompts(trace: Trace, prefilled: int) -> IntArray | None:
    """Concatenate the prompts, each with its first output token if the prompt's pass emits it."""
    if trace.prompt is None or not prefilled:
        return trace.prompt
    ends = np.cumsum(trace.prompt_tokens)
    return np.insert(trace.prompt, ends, trace.token[trace.offsets[:-1]])


def rounds_of(log: RoundLog, trace: Trace, conventions: Conventions) -> Rounds:
    """The rounds that the engine counts, with positions as the engine numbers its output tokens.

    Tokens that a policy drops do not count: engines count verified tokens.

    trace : that was replayed
    """
    if conventions.accepts_end != "always":
        ends = log.t + log.accepted == trace.output_tokens[log.sequence]  # no token of the target followed
        if conventions.accepts_end == "last":
            ends &= log.verified > log.accepted
        log = dataclasses.replace(log, accepted=log.accepted - ends)
    if not conventions.counts_empty:
        log = log[log.verified > 0]
    drafted, accepted, sequence, t = (
        column.astype(np.int64) for column in (log.verified, log.accepted, log.sequence, log.t)
    )
    return Rounds(drafted, accepted, None, sequence, t + int(conventions.first_token == "prefill"))


def counters_of(rounds: Rounds) -> Counters:
    """Per draft depth the rounds that drafted so far, and those that accepted so far."""
    depth = np.arange(1, int(rounds.drafted.max(initial=0)) + 1)
    drafted, accepted = ((column[:, None] >= depth).sum(axis=0) for column in (rounds.drafted, rounds.accepted))
    return Counters(drafted, accepted)
