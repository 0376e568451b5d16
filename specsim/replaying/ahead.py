"""Replay drafting ahead: while a draft is verified, the drafter prepares drafts for likely outcomes.

The outcome of a verification is the number of accepted tokens and the token that the target adds. The drafter knows its
draft and, at every place of it, which candidates are next best. So an outcome is a pair (accepted, rank): the target
accepts so many tokens and adds the candidate of this rank. If a fixed draft was prepared for the outcome, the next
verification starts at once; otherwise the drafter drafts after the verification, as without drafting ahead.

Whether the outcome was among the prepared ones is counted, not estimated: `true_rank` has the rank of the target's
token behind every accepted prefix.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from specsim.cost.table import CostTable
from specsim.io.arrays import Floats, IntArray, Ints, Seconds
from specsim.io.errors import InputError
from specsim.policy.compiler import prepare_compiler
from specsim.trace.trace import Trace

prepare_compiler()  # ahead of the first function that is compiled, or loaded
FIRST, MISSED, READY = 0, 1, 2  # how a round got its draft; FIRST: of a sequence, or nothing to draft


class Outcomes(NamedTuple):
    """Calibrated probabilities, from which those of outcomes follow.

    accept : float64 [N, D], of the draft's next token at every position, if all before it are accepted
    by_depth : float64 [D], the same averaged over positions, for drafts that follow a prepared one
    rank : float64 [D, W], of rank 1 to W of the target's token, if it is not the drafter's first choice
    """

    accept: Floats
    by_depth: Floats
    rank: Floats


class AheadSettings(NamedTuple):
    """How to draft ahead.

    k : tokens of a draft
    prepared : outcomes that a draft is prepared for; 0 is plain speculation
    pearl : prepare for a single outcome, that all is accepted and the drafter's own next token follows; and after any
        other outcome verify the first token of the next draft while the rest is drafted (Liu et al. 2024)
    own_device : whether the drafter has a device of its own, so that its work overlaps the verification
    text_alone : whether drafts depend on the text alone; see `reads_text_alone`
    """

    k: int
    prepared: int
    pearl: bool
    own_device: bool
    text_alone: bool


class AheadRounds(NamedTuple):
    """Counts and seconds per sequence [S], and how the round that starts at each position got its draft, int8 [N].

    rounds : passes of the target
    chances : rounds whose draft could have been prepared: all but a sequence's first one, and those without a draft
    hits : those whose draft was prepared
    draft_of : FIRST, MISSED or READY; -1 where no round starts
    """

    rounds: Ints
    chances: Ints
    hits: Ints
    seconds: Seconds
    draft_of: IntArray


class _Columns(NamedTuple):
    offsets: IntArray
    prompt_tokens: IntArray
    budget_tokens: IntArray
    draft_limit: IntArray
    true_rank: IntArray


def reads_text_alone(trace: Trace) -> bool:
    """Tell whether the drafter's candidates depend on the text alone, as an independent model's do.

    Then the target's token has the same rank wherever a draft began. A drafter that reads the target's states sees
    those of verified tokens alone, and takes its own for the tokens of a draft.
    """
    rank = _ranks(trace)
    inside = (rank[:-1, 1:] >= 0) & (trace.position[1:, None] > 0)
    return bool((rank[:-1, 1:] == rank[1:, :-1])[inside].all())


def replay_ahead(trace: Trace, settings: AheadSettings, outcomes: Outcomes, table: CostTable) -> AheadRounds:
    """Replay drafts of k tokens, prepared for the most probable outcomes.

    While a draft is verified, the drafter takes in its last token and then drafts k tokens behind every outcome, all
    outcomes in a pass. On a device of its own this takes no time unless it outlasts the verification before a hit; on a
    shared device it is added. Drafts of a drafter that reads the target's states are prepared from its own states,
    never further than the trace's depth behind the last verified token.

    Raises InputError where the trace lacks the ranks, k is not below its depth, or the costs do not price the passes.
    """
    rank = _ranks(trace)
    if not 1 <= settings.k < trace.depth:
        raise InputError(
            f"drafts of {settings.k} tokens; the rank of the token behind them has to be recorded too: give 1 to "
            f"{trace.depth - 1}"
        )
    prepared = settings.prepared
    wider_s = np.zeros(len(table.catch_up_s))
    if prepared > 1:
        if table.tree is None or prepared >= len(table.tree.wider_s):
            raise InputError(
                f"costs do not price draft passes over {prepared} outcomes; give costs that price trees, or prepare 1"
            )
        wider_s = table.tree.wider_s[prepared]
    columns = _Columns(trace.offsets, trace.prompt_tokens, trace.budget_tokens, trace.draft_limit, rank)
    costs = (table.bucket_bits, table.draft_s, table.catch_up_s, table.verify_s, wider_s, table.policy_step_s)
    rounds, chances, hits = np.zeros((3, trace.sequences), np.int64)
    result = AheadRounds(rounds, chances, hits, np.zeros(trace.sequences), np.full(len(rank), -1, np.int8))
    _replay(columns, settings, outcomes, costs, result)
    return result._replace(seconds=result.seconds + result.rounds * table.round_overhead_s)


def _ranks(trace: Trace) -> IntArray:
    if trace.true_rank is None or trace.sampled_by_rejection:
        raise InputError(
            "drafting ahead needs the rank of the target's token at every depth (true_rank) of a greedy or Gumbel "
            "trace; record one with `realrun record`"
        )
    return trace.true_rank


@nb.njit(cache=True, nogil=True)
def outcome_probs(accept, rank):  # type: ignore[no-untyped-def]
    """Probability of every outcome of a draft of k tokens: float64 [k + 1, W + 1], by accepted tokens and rank.

    A draft that is cut at a wrong token is followed by one of rank 1 or more, and only a draft that is accepted
    whole by any.

    accept : float64 [k + 1], of the draft's tokens and the drafter's next one, each if all before it are accepted
    rank : float64 [k + 1, W], as in `Outcomes`
    """
    places, width = rank.shape
    result = np.zeros((places, width + 1))
    path = 1.0
    for a in range(places):
        for r in range(width):
            result[a, r + 1] = path * (1.0 - accept[a]) * rank[a, r]
        path *= accept[a]
    result[places - 1, 0] = path
    return result


@nb.njit(cache=True, nogil=True)
def place_of(probs, accepted, rank):  # type: ignore[no-untyped-def]
    """Number of outcomes to prepare, the most probable first, until this outcome is among them."""
    if rank >= probs.shape[1] or probs[accepted, rank] <= 0.0:
        return probs.size + 1
    own, count = probs[accepted, rank], 1
    for a in range(probs.shape[0]):
        for r in range(probs.shape[1]):
            earlier = a < accepted or (a == accepted and r < rank)
            count += probs[a, r] > own or (probs[a, r] == own and earlier)
    return count


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _replay(trace, settings, outcomes, costs, result):  # type: ignore[no-untyped-def]
    """Replay all sequences, and add what each took to the result."""
    bucket_bits, draft_s, catch_up_s, verify_s, wider_s, policy_step_s = costs
    k, depth_limit = settings.k, trace.true_rank.shape[1]
    longest = k - 1 if settings.pearl else k  # its first token is verified while the others are drafted
    for s in range(len(trace.prompt_tokens)):
        start, end = trace.offsets[s], trace.offsets[s + 1]
        t = row = start
        depth = 0  # the draft at t is of the drafter's own states since `row`, whose token is this far behind
        state = FIRST
        behind = False
        while t < end:
            bucket = (trace.prompt_tokens[s] - 1 + t - start) >> bucket_bits
            left = trace.budget_tokens[s] - (t - start) - 1
            if state != READY:
                row, depth = t, 0
            limit = np.int64(trace.draft_limit[t]) if depth == 0 else left
            result.draft_of[t] = state if limit > 0 else FIRST
            result.rounds[s] += 1
            fresh = state != READY
            if limit > 0 and state != FIRST:
                result.chances[s] += 1
                result.hits[s] += state == READY
            alone = settings.pearl and fresh  # the pending token is verified while all k are drafted
            drafted = 0 if alone else min(longest, limit)
            accepted = 0
            while accepted < drafted and trace.true_rank[row, depth + accepted] == 0:
                accepted += 1
            making_s = 0.0
            if fresh and limit > 0:
                making = min(k, limit)
                making_s = draft_s[making, bucket] + behind * catch_up_s[bucket] + (making - 1) * policy_step_s
            behind = settings.prepared == 0 and not settings.pearl and 0 < drafted == accepted
            state = MISSED
            following = depth + accepted + 1  # tokens since `row` before the next draft
            fits = settings.text_alone or following + longest < depth_limit
            rank = np.int64(trace.true_rank[row, depth + accepted])
            if t + accepted + 1 < end and limit > 0 and fits:
                if settings.pearl:
                    state = READY if accepted == drafted and rank == 0 else MISSED
                elif settings.prepared > 0:
                    accept = outcomes.by_depth[depth : depth + drafted + 1].copy()
                    if depth == 0:
                        accept = outcomes.accept[row, : drafted + 1].copy()
                    probs = outcome_probs(accept, outcomes.rank[depth : depth + drafted + 1])
                    if not settings.text_alone:
                        probs[max(depth_limit - longest - depth - 1, 0) :] = 0.0  # those that do not fit
                    state = READY if place_of(probs, accepted, rank) <= settings.prepared else MISSED
            pass_s = verify_s[drafted + 1, bucket]
            ahead_s = 0.0
            if settings.pearl and not alone:
                ahead_s = draft_s[k, bucket]
            elif settings.prepared > 0 and drafted > 0:
                ahead_s = draft_s[k + 1, bucket] + k * wider_s[bucket]
            if not settings.own_device:
                result.seconds[s] += making_s + pass_s + ahead_s
            elif alone:
                result.seconds[s] += max(making_s, pass_s)
            else:
                result.seconds[s] += making_s + (max(pass_s, ahead_s) if state == READY else pass_s)
            t += accepted + 1
            if settings.text_alone:
                row, depth = t, 0
            else:
                depth = following
