"""Replay a dense trace under a chain policy: round for round what a real run would do."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType

import numba as nb
import numpy as np
import numpy.typing as npt

from specsim.cost import CostModel, CostTable, compile_table
from specsim.errors import InputError
from specsim.policy.base import ChainPolicy, Step

# `specialise` rebinds these three names to each policy's own functions.
from specsim.policy.fixed_k import initial_state, keep_drafting, update
from specsim.randomness import uniform
from specsim.rejection import outcomes
from specsim.trace import IntArray, Trace

ROUNDS, DRAFTED, ACCEPTED, POLICY_STEPS = range(4)
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
    verify_s,
    policy_step_s,
    round_overhead_s,
    counts,
    seconds,
    rounds_log,
):
    """The loop of one policy over the sequences `which`; `specialise` binds the policy's functions.

    Row i of counts and seconds grows by what sequence which[i] took.
    """
    log_row = 0
    logging = rounds_log.shape[0] > 0
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
                draft_time += draft_s[behind, bucket] + (drafted - 1) * draft_s[0, bucket]
            behind = 1 if 0 < drafted == accepted else 0
            verify_time += verify_s[drafted + 1, bucket]
            rounds += 1
            all_drafted += drafted
            all_accepted += accepted
            all_asked += asked
            if logging:
                rounds_log[log_row, 0] = s
                rounds_log[log_row, 1] = t - start
                rounds_log[log_row, 2] = drafted
                rounds_log[log_row, 3] = accepted
                log_row += 1
            t += accepted + 1
        counts[i, ROUNDS] += rounds
        counts[i, DRAFTED] += all_drafted
        counts[i, ACCEPTED] += all_accepted
        counts[i, POLICY_STEPS] += all_asked
        seconds[i, DRAFT_S] += draft_time
        seconds[i, POLICY_S] += all_asked * policy_step_s
        seconds[i, VERIFY_S] += verify_time
        seconds[i, OTHER_S] += rounds * round_overhead_s
    return log_row


@cache
def specialise(kind: type[ChainPolicy]) -> Callable[..., int]:
    """The replay kernel compiled with one policy's functions inside.

    The policy's functions become globals of a copy of `_replay`, so that numba can keep
    the compiled code on disk; the copy's name carries a hash of the policy's file and of the
    policy folder, so that an edited policy is compiled anew. Only specsim's own policies are
    kept: what a user's file calls elsewhere may change without the file, and numba loads kept
    code only where the file's module can be imported by name.
    """
    functions = {name: getattr(kind, name) for name in ("initial_state", "keep_drafting", "update")}
    sources = {Path(inspect.getfile(f.py_func)) for f in functions.values()}
    sources |= {*(Path(__file__).parent / "policy").glob("*.py"), Path(__file__).parent / "randomness.py"}
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:12]
    bound = FunctionType(_replay.__code__, {**globals(), **functions}, f"replay_{kind.name}_{digest}")
    bound.__module__ = __name__
    bound.__qualname__ = bound.__name__
    compile_kernel: Callable[[Callable[..., int]], Callable[..., int]]
    own = all(f.py_func.__module__.startswith("specsim.") for f in functions.values())
    compile_kernel = nb.njit(cache=own, nogil=True, error_model="numpy")
    return compile_kernel(bound)


@dataclass(frozen=True)
class Replay:
    """Counts and seconds per sequence of one policy on one trace.

    rounds, drafted, accepted, policy_steps, output_tokens : int64 [S]
    seconds : float64 [S, 4], in draft, policy, verify, other
    autoregressive_s : float64 [S], the baseline on the same sequences
    log : int64 [R, 4] of (sequence index, t, drafted, accepted) per round, or None
    draws : outcomes of every sequence that all but the log sum over; 1 on an exact trace
    """

    policy: ChainPolicy
    rounds: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    policy_steps: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    autoregressive_s: npt.NDArray[np.float64]
    log: npt.NDArray[np.int64] | None
    draws: int = 1

    @property
    def approximate(self) -> bool:
        """Whether acceptance was drawn, so that rounds chain approximately."""
        return self.draws > 1

    @property
    def speculative_s(self) -> npt.NDArray[np.float64]:
        """Seconds per sequence, all parts."""
        total: npt.NDArray[np.float64] = self.seconds.sum(axis=1)
        return total

    @property
    def speedup(self) -> float:
        """Baseline seconds over speculative seconds, summed over sequences."""
        return float(self.autoregressive_s.sum() / self.seconds.sum())


def why_not(trace: Trace, kind: type[ChainPolicy]) -> str | None:
    """Why this kind of policy does not belong in a comparison on this trace; None if it does."""
    drafter = trace.meta.get("drafter_kind", "chain")
    if kind.drafter_kinds and drafter not in kind.drafter_kinds:
        return f"meant for drafters of kind {', '.join(kind.drafter_kinds)}; this trace's is {drafter}"
    missing = [name for name in kind.features if getattr(trace, name) is None]
    return f"needs the column {missing[0]!r}, which this trace lacks" if missing else None


def check_replayable(trace: Trace, policy: ChainPolicy) -> None:
    """InputError if the policy asks for what the trace does not hold."""
    if policy.max_draft_tokens > trace.depth:
        raise InputError(
            f"policy {policy} drafts up to {policy.max_draft_tokens} tokens, the trace is recorded to depth "
            f"{trace.depth}; lower the limit or record deeper"
        )
    for name in policy.features:
        if getattr(trace, name) is None:
            raise InputError(f"policy {policy.name} needs the column {name!r}, which this trace lacks; record it")


def check_covered(trace: Trace, policy: ChainPolicy, table: CostTable) -> None:
    """InputError if the replay could look up what the table does not hold; the kernel does not check."""
    sizes, columns = table.verify_s.shape
    longest = context_range(trace)[1]
    if sizes < policy.max_draft_tokens + 2 or columns <= longest >> table.bucket_bits:
        raise InputError(
            f"cost table covers verification of up to {sizes - 1} tokens and contexts below "
            f"{columns << table.bucket_bits}, the replay of {policy} needs {policy.max_draft_tokens + 1} "
            f"and {longest}; compile it for this trace"
        )


def compiled(policy: ChainPolicy) -> Callable[..., int]:
    """The kernel bound to one policy: `run(trace, table, outcome, which, counts, seconds, rounds_log)`.

    `which` holds sequence indices [M] in the order to take them; counts int64 and seconds
    float64 [M, 4] grow by what each took. Nothing is checked: see `check_replayable`,
    `check_covered`. Safe in threads that write to different arrays.
    """
    kernel = specialise(type(policy))  # type: ignore[arg-type]  # a class hashes well
    params, carries_state, max_draft = policy.params, policy.carries_state, policy.max_draft_tokens

    def run(
        trace: Trace,
        table: CostTable,
        outcome: tuple[IntArray, int],
        which: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64],
        rounds_log: npt.NDArray[np.int64],
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
            table.verify_s,
            table.policy_step_s,
            table.round_overhead_s,
            counts,
            seconds,
            rounds_log,
        )

    return run


def replay(trace: Trace, policy: ChainPolicy, table: CostTable, *, seed: int = 0, log: bool = False) -> Replay:
    """Run one policy over a trace. Exact where the trace is (greedy or Gumbel-coupled).

    On a trace of rejection sampling all of the result sums over DRAWS outcomes of every
    sequence, but for the log, which is the first's; a policy's state starts anew with each
    outcome (`specsim.rejection`).
    """
    check_replayable(trace, policy)
    check_covered(trace, policy, table)
    counts = np.zeros((trace.sequences, 4), dtype=np.int64)
    seconds = np.zeros((trace.sequences, 4))
    rounds_log = np.zeros((len(trace.token) if log else 0, 4), dtype=np.int64)
    run, which = compiled(policy), np.arange(trace.sequences)
    draws, written = 0, 0
    for draws, outcome in enumerate(outcomes(trace, seed), start=1):
        logged = run(trace, table, outcome, which, counts, seconds, rounds_log if draws == 1 else rounds_log[:0])
        written = written or logged
    return Replay(
        policy=policy,
        rounds=counts[:, ROUNDS],
        drafted=counts[:, DRAFTED],
        accepted=counts[:, ACCEPTED],
        policy_steps=counts[:, POLICY_STEPS],
        output_tokens=draws * trace.output_tokens.astype(np.int64),
        seconds=seconds,
        autoregressive_s=draws * autoregressive_seconds(trace, table),
        log=rounds_log[:written] if log else None,
        draws=draws,
    )


def autoregressive_seconds(trace: Trace, table: CostTable) -> npt.NDArray[np.float64]:
    """Seconds per sequence [S] to emit the same tokens one by one."""
    context = np.arange(context_range(trace)[1] + 1)
    step_s = table.autoregressive_s[context >> table.bucket_bits]
    elapsed_s = np.concatenate([[0.0], np.cumsum(step_s)])
    first = trace.prompt_tokens - 1
    result: npt.NDArray[np.float64] = elapsed_s[first + trace.output_tokens] - elapsed_s[first]
    return result


def context_range(trace: Trace) -> tuple[int, int]:
    """Smallest and largest context, in cached tokens, that a replay looks up."""
    return int(trace.prompt_tokens.min()) - 1, int((trace.prompt_tokens + trace.output_tokens).max()) - 2


def compile_for(trace: Trace, model: CostModel, policy: ChainPolicy | None = None) -> CostTable:
    """The cost table of this policy on this trace; without one, of all policies that leave costs as they are."""
    if policy is not None:
        model = policy.cost(model)
    return compile_table(model, max_draft_tokens=trace.depth, contexts=context_range(trace))
