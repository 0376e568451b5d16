"""The replay kernel of policies that choose the drafter of every round."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from specsim.cost.joined import JoinedTable
from specsim.cost.table import CostTable
from specsim.io.arrays import Array, Floats, IntArray, Seconds
from specsim.policy.chain.base import Step
from specsim.policy.switch.base import SwitchPolicy, chosen, longest_draft

# `switch_kernel` rebinds these four names to each policy's own functions.
from specsim.policy.switch.one_drafter import OneDrafter, choose
from specsim.replaying.kernel import specialise
from specsim.replaying.rounds import RoundLog, Sums
from specsim.trace.joined import JoinedTrace
from specsim.trace.trace import Trace

initial_state, keep_drafting, update = OneDrafter.initial_state, OneDrafter.keep_drafting, OneDrafter.update


class SwitchTrace(NamedTuple):
    """What the kernel reads of a joined trace; see `JoinedTrace`."""

    offsets: IntArray
    prompt_tokens: IntArray
    draft_limit: Array
    match_len: Array
    confidence: Array
    foretold: Array


class SwitchCosts(NamedTuple):
    """What the kernel reads of a joined table; see `JoinedTable`."""

    bucket_bits: int
    draft_s: Seconds
    catch_up_s: Seconds
    verify_s: Seconds
    refeed_s: Seconds
    policy_step_s: Floats
    round_overhead_s: Floats


def switch_trace(trace: JoinedTrace) -> SwitchTrace:
    """Select what kernels read of a joined trace."""
    return SwitchTrace(trace.offsets, trace.prompt_tokens, *trace.columns)


def switch_costs(table: JoinedTable) -> SwitchCosts:
    """Select what kernels read of a joined table."""
    each = {name: getattr(table, f"each_{name}") for name in SwitchCosts._fields[1:]}
    return SwitchCosts(table.bucket_bits, **each)


def _replay(params, carries_state, which, trace, costs, sums, log):  # type: ignore[no-untyped-def]
    """Replay the sequences `which` under a policy, whose functions `switch_kernel` binds; see the kernel of chains.

    A drafter's cache falls behind in every round in which another drafter drafts, and catches up, at its price, in the
    first step of its next draft. The choice of a drafter costs a policy step.
    """
    bucket_bits = costs.bucket_bits
    drafters = trace.foretold.shape[1]
    lag = np.zeros(drafters, np.int64)
    log_row = 0
    logging = len(log.t) > 0
    state = initial_state(params)
    for i, s in enumerate(which):
        if not carries_state:
            state = initial_state(params)
        start, end = trace.offsets[s], trace.offsets[s + 1]
        base_context = trace.prompt_tokens[s] - start - 1
        for drafter in range(drafters):
            lag[drafter] = 0
        t = start
        while t < end:
            bucket = (base_context + t) >> bucket_bits
            d, drafted, asked, accepted = int(state[0]), 0, 0, 0  # the drafter of the round before, if none can draft
            can_draft = False
            for drafter in range(drafters):
                can_draft |= trace.draft_limit[drafter, t] > 0
            if can_draft:
                d = choose(state, params, trace.foretold[t])
                state = chosen(state, d)
                asked = 1
                limit = min(longest_draft(params, d), np.int64(trace.draft_limit[d, t]))
                drafted = min(limit, 1)
                while 0 < drafted < limit:
                    confidence = np.float64(trace.confidence[d, t, drafted - 1])
                    asked += 1
                    proceed, state = keep_drafting(state, params, Step(0.0, confidence, 0.0, 0.0, 0.0), drafted, 0.0)
                    if not proceed:
                        break
                    drafted += 1
                accepted = min(drafted, np.int64(trace.match_len[d, t]))
            sums.num_rounds[i] += 1
            sums.drafted[i] += drafted
            sums.verified[i] += drafted
            sums.accepted[i] += accepted
            sums.policy_steps[i] += asked
            sums.policy_s[i] += asked * costs.policy_step_s[d]
            round_verify_s = costs.verify_s[d, drafted + 1, bucket]
            if accepted < drafted and t + accepted + 1 < end:
                round_verify_s += costs.refeed_s[d, accepted + 1, bucket]
            sums.verify_s[i] += round_verify_s
            sums.other_s[i] += costs.round_overhead_s[d]
            round_draft_s = 0.0
            if drafted > 0:
                round_draft_s = costs.draft_s[d, drafted, bucket] + costs.catch_up_s[d, lag[d], bucket]
                sums.draft_s[i] += round_draft_s
                state = update(state, params, drafted, accepted)
            for drafter in range(drafters):
                lag[drafter] += accepted + 1
            if drafted > 0:
                lag[d] = 1 if accepted == drafted else 0  # the last drafted token is not in the draft cache
            if logging:
                log.sequence[log_row], log.t[log_row] = s, t - start
                log.drafted[log_row] = log.verified[log_row] = drafted
                log.accepted[log_row] = log.last[log_row] = accepted
                log.drafter[log_row] = d + 1 if drafted > 0 else 0
                log.draft_s[log_row], log.policy_s[log_row] = round_draft_s, asked * costs.policy_step_s[d]
                log.verify_s[log_row] = round_verify_s
                log.other_s[log_row] = costs.round_overhead_s[d]
                log_row += 1
            t += accepted + 1
    return log_row


@cache
def switch_kernel(kind: type[SwitchPolicy]) -> Callable[..., int]:
    """Compile the kernel with a policy's functions inside."""
    return specialise(_replay, globals(), kind)


def bind_switch(policy: SwitchPolicy) -> Callable[..., int]:
    """Bind the kernel to a policy; see `specsim.replaying.replay.bind_kernel`. Trace and table are joined ones."""
    kernel, own = switch_kernel(type(policy)), (policy.params, policy.carries_state)  # type: ignore[arg-type]

    def run(trace: Trace, table: CostTable, seed: int, which: IntArray, sums: Sums, log: RoundLog) -> int:
        assert isinstance(trace, JoinedTrace) and isinstance(table, JoinedTable)
        return kernel(*own, which, switch_trace(trace), switch_costs(table), sums, log.arrays)

    return run
