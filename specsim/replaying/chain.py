"""The replay kernel of chain policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from specsim.cost.table import CostTable
from specsim.io.arrays import Array, FloatArray, IntArray, Ints, Seconds
from specsim.io.rng import uniform
from specsim.policy.chain.base import ChainPolicy, Step

# `chain_kernel` rebinds these three names to each policy's own functions.
from specsim.policy.chain.fixed_k import keep_drafting
from specsim.policy.memoryless import initial_state, update
from specsim.replaying.kernel import select_fields, specialise
from specsim.replaying.rounds import RoundLog, Sums
from specsim.trace.trace import Trace


class ChainTrace(NamedTuple):
    """What the kernel reads of a trace; see `Trace`."""

    offsets: IntArray
    sequence_id: IntArray
    prompt_tokens: IntArray
    draft_limit: IntArray
    prob: Array
    confidence: Array
    entropy_nats: Array
    score: Array
    top10_confidence: Array


class ChainRule(NamedTuple):
    """What the kernel reads of a policy; see `ChainPolicy`."""

    params: Any
    carries_state: bool
    drops_refused: bool
    max_draft_tokens: int


class ChainCosts(NamedTuple):
    """What the kernel reads of a cost table; see `CostTable`."""

    bucket_bits: int
    draft_s: Seconds
    catch_up_s: Seconds
    verify_s: Seconds
    refeed_s: Seconds
    policy_step_s: float
    round_overhead_s: float


def _replay(  # type: ignore[no-untyped-def]
    rule, seed, which, match_len, trace, costs, sums, log
):
    """Replay the sequences `which` under a policy, whose functions `chain_kernel` binds.

    Add what sequence which[i] took to entry i of the sums; return the number of logged rounds.
    """
    params, carries_state, drops_refused, max_draft_tokens = rule
    offsets, draft_limit, prob, confidence = trace.offsets, trace.draft_limit, trace.prob, trace.confidence
    entropy_nats, score, top10_confidence = trace.entropy_nats, trace.score, trace.top10_confidence
    bucket_bits, draft_s, catch_up_s, verify_s = costs.bucket_bits, costs.draft_s, costs.catch_up_s, costs.verify_s
    log_row = 0
    logging = len(log.t) > 0
    state = initial_state(params)
    for i, s in enumerate(which):
        if not carries_state:
            state = initial_state(params)
        start, end = offsets[s], offsets[s + 1]
        base_context = trace.prompt_tokens[s] - start - 1
        sequence_id = trace.sequence_id[s]
        t = start
        behind = 0  # 1 after a fully accepted draft: its last token is not in the draft cache
        rounds = all_drafted = all_verified = all_accepted = all_asked = 0
        draft_time = verify_time = 0.0
        while t < end:
            limit = min(max_draft_tokens, np.int64(draft_limit[t]))
            drafted = min(limit, 1)
            asked = dropped = 0
            while drafted > 0 and (drafted < limit or drops_refused):
                step = Step(
                    np.float64(prob[t, drafted - 1]),
                    np.float64(confidence[t, drafted - 1]),
                    np.float64(entropy_nats[t, drafted - 1]),
                    np.float64(score[t, drafted - 1]),
                    np.float64(top10_confidence[t, drafted - 1]),
                )
                asked += 1
                u = uniform(seed, sequence_id, t - start, drafted)
                proceed, state = keep_drafting(state, params, step, drafted, u)
                if not proceed:
                    dropped = 1 if drops_refused else 0
                    break
                if drafted == limit:
                    break
                drafted += 1
            verified = drafted - dropped
            accepted = min(verified, np.int64(match_len[t]))
            bucket = (base_context + t) >> bucket_bits
            round_draft_s = 0.0
            if drafted > 0:
                state = update(state, params, verified, accepted)
                round_draft_s = draft_s[drafted, bucket] + behind * catch_up_s[bucket]
            round_verify_s = verify_s[verified + 1, bucket]
            if accepted < verified and t + accepted + 1 < end:
                round_verify_s += costs.refeed_s[accepted + 1, bucket]
            draft_time += round_draft_s
            behind = 1 if 0 < drafted == accepted else 0  # a dropped token's pass has cached its predecessor
            verify_time += round_verify_s
            rounds += 1
            all_drafted += drafted
            all_verified += verified
            all_accepted += accepted
            all_asked += asked
            if logging:
                log.sequence[log_row] = s
                log.t[log_row] = t - start
                log.drafted[log_row], log.verified[log_row] = drafted, verified
                log.accepted[log_row] = log.last[log_row] = accepted
                log.draft_s[log_row], log.policy_s[log_row] = round_draft_s, asked * costs.policy_step_s
                log.verify_s[log_row] = round_verify_s
                log.other_s[log_row] = costs.round_overhead_s
                log_row += 1
            t += accepted + 1
        sums.num_rounds[i] += rounds
        sums.drafted[i] += all_drafted
        sums.accepted[i] += all_accepted
        sums.policy_steps[i] += all_asked
        sums.verified[i] += all_verified
        sums.draft_s[i] += draft_time
        sums.policy_s[i] += all_asked * costs.policy_step_s
        sums.verify_s[i] += verify_time
        sums.other_s[i] += rounds * costs.round_overhead_s
    return log_row


def or_unread(trace: Trace, column: FloatArray | None) -> FloatArray:
    """Replace an optional column that is not recorded: policies that read it are not replayed then."""
    return trace.confidence if column is None else column


@cache
def chain_kernel(kind: type[ChainPolicy]) -> Callable[..., int]:
    """Compile the kernel with a policy's functions inside."""
    return specialise(_replay, globals(), kind)


def bind_chain(policy: ChainPolicy) -> Callable[..., int]:
    """Bind the kernel to a policy; see `specsim.replaying.replay.bind_kernel`."""
    kernel = chain_kernel(type(policy))  # type: ignore[arg-type]  # a class hashes well
    rule = select_fields(ChainRule, policy)

    def run(trace: Trace, table: CostTable, seed: int, which: Ints, sums: Sums, log: RoundLog) -> int:
        optional = {name: or_unread(trace, getattr(trace, name)) for name in ("score", "top10_confidence")}
        recorded = select_fields(ChainTrace, trace, **optional)
        return kernel(rule, seed, which, trace.match_len, recorded, select_fields(ChainCosts, table), sums, log.arrays)

    return run
