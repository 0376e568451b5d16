"""The replay kernel of chain policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from specsim.arrays import Floats, IntArray, Ints
from specsim.cost.table import CostTable
from specsim.policy.chain.base import ChainPolicy, Step

# `specialise` rebinds these three names to each policy's own functions.
from specsim.policy.chain.fixed_k import initial_state, keep_drafting, update
from specsim.replaying.kernel import bind
from specsim.replaying.rounds import RoundLog
from specsim.rng import uniform
from specsim.trace.trace import Trace

ROUNDS, DRAFTED, ACCEPTED, POLICY_STEPS, VERIFIED, TRUNCATED = range(6)
COUNTS = 6
DRAFT_S, POLICY_S, VERIFY_S, OTHER_S = range(4)


def _replay(  # type: ignore[no-untyped-def]
    params,
    carries_state,
    max_draft,
    seed,
    which,
    offsets,
    sequence_id,
    prompt_tokens,
    match_len,
    draft_limit,
    prob,
    confidence,
    entropy_nats,
    score,
    bucket_bits,
    draft_s,
    catch_up_s,
    verify_s,
    policy_step_s,
    round_overhead_s,
    counts,
    seconds,
    log,
):
    """The loop of one policy over the sequences `which`; `specialise` binds the policy's functions.

    Row i of counts and seconds grows by what sequence which[i] took.
    """
    log_row = 0
    logging = len(log.t) > 0
    state = initial_state(params)
    for i, s in enumerate(which):
        if not carries_state:
            state = initial_state(params)
        start, end = offsets[s], offsets[s + 1]
        base_context = prompt_tokens[s] - start - 1
        t = start
        behind = 0  # 1 after a fully accepted draft: its last token is not in the draft cache
        rounds = all_drafted = all_accepted = all_asked = 0
        draft_time = verify_time = 0.0
        while t < end:
            limit = min(max_draft, np.int64(draft_limit[t]))
            drafted = min(limit, 1)
            asked = 0
            while 0 < drafted < limit:
                step = Step(
                    np.float64(prob[t, drafted - 1]),
                    np.float64(confidence[t, drafted - 1]),
                    np.float64(entropy_nats[t, drafted - 1]),
                    np.float64(score[t, drafted - 1]),
                )
                asked += 1
                u = uniform(seed, sequence_id[s], t - start, drafted)
                proceed, state = keep_drafting(state, params, step, drafted, u)
                if not proceed:
                    break
                drafted += 1
            accepted = min(drafted, np.int64(match_len[t]))
            bucket = (base_context + t) >> bucket_bits
            if drafted > 0:
                state = update(state, params, drafted, accepted)
                draft_time += draft_s[drafted, bucket] + behind * catch_up_s[bucket]
            behind = 1 if 0 < drafted == accepted else 0
            verify_time += verify_s[drafted + 1, bucket]
            rounds += 1
            all_drafted += drafted
            all_accepted += accepted
            all_asked += asked
            if logging:
                log.sequence[log_row] = s
                log.t[log_row] = t - start
                log.drafted[log_row] = log.verified[log_row] = drafted
                log.accepted[log_row] = log.last[log_row] = accepted
                log_row += 1
            t += accepted + 1
        counts[i, ROUNDS] += rounds
        counts[i, DRAFTED] += all_drafted
        counts[i, ACCEPTED] += all_accepted
        counts[i, POLICY_STEPS] += all_asked
        counts[i, VERIFIED] += all_drafted
        seconds[i, DRAFT_S] += draft_time
        seconds[i, POLICY_S] += all_asked * policy_step_s
        seconds[i, VERIFY_S] += verify_time
        seconds[i, OTHER_S] += rounds * round_overhead_s
    return log_row


@cache
def specialise(kind: type[ChainPolicy]) -> Callable[..., int]:
    """The kernel compiled with one policy's functions inside."""
    return bind(_replay, globals(), kind)


def run_chain(policy: ChainPolicy) -> Callable[..., int]:
    """The kernel bound to one policy; see `specsim.replaying.replay.compiled`."""
    kernel = specialise(type(policy))  # type: ignore[arg-type]  # a class hashes well
    params, carries_state, max_draft = policy.params, policy.carries_state, policy.max_draft_tokens

    def run(
        trace: Trace,
        table: CostTable,
        outcome: tuple[IntArray, int],
        which: Ints,
        counts: Ints,
        seconds: Floats,
        log: RoundLog,
    ) -> int:
        match_len, seed = outcome
        return kernel(
            params,
            carries_state,
            max_draft,
            seed,
            which,
            trace.offsets,
            trace.sequence_id,
            trace.prompt_tokens,
            match_len,
            trace.draft_limit,
            trace.prob,
            trace.confidence,
            trace.entropy_nats,
            trace.confidence if trace.score is None else trace.score,  # unread unless required
            table.bucket_bits,
            table.draft_s,
            table.catch_up_s,
            table.verify_s,
            table.policy_step_s,
            table.round_overhead_s,
            counts,
            seconds,
            log.arrays,
        )

    return run
