"""Replay a dense trace under a policy: round for round what a real run would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.chain_replay import (
    ACCEPTED,
    COUNTS,
    DRAFTED,
    POLICY_STEPS,
    ROUNDS,
    TRUNCATED,
    VERIFIED,
    run_chain,
    specialise,
)
from specsim.cost import SPACE, CostModel, CostTable, SpaceCost, compile_table
from specsim.errors import InputError
from specsim.policy.base import ChainPolicy, Policy
from specsim.policy.tree import TreePolicy
from specsim.rejection import outcomes
from specsim.trace import Trace
from specsim.tree_replay import LOG, run_tree, specialise_tree


@dataclass(frozen=True)
class Replay:
    """Counts and seconds per sequence of one policy on one trace.

    rounds, drafted, accepted, policy_steps, output_tokens : int64 [S]
    verified : int64 [S], tokens in the target's passes beside the pending ones; a chain's are all drafted ones
    truncated : int64 [S], rounds in which a tree policy asked for nodes that the trace does not hold and that might
        have been verified; the replay goes on as if they had not been drafted; None of a chain
    seconds : float64 [S, 4], in draft, policy, verify, other
    autoregressive_s : float64 [S], the baseline on the same sequences
    log : per round, int64 [R, 4] of (sequence index, t, drafted, accepted) or, of a tree policy, [R, 6] with
        verified and the place of the last accepted node among the verified ones, from 1 on, as well; or None
    draws : outcomes of every sequence that all but the log sum over; 1 on an exact trace
    """

    policy: Policy
    rounds: npt.NDArray[np.int64]
    drafted: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    policy_steps: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    autoregressive_s: npt.NDArray[np.float64]
    log: npt.NDArray[np.int64] | None
    verified: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.int64] | None = None
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
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """What there is per sequence, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "log"}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    @property
    def speedup(self) -> float:
        """Baseline seconds over speculative seconds, summed over sequences."""
        return float(self.autoregressive_s.sum() / self.seconds.sum())


def why_not(trace: Trace, kind: type[Policy]) -> str | None:
    """Why this kind of policy does not belong in a comparison on this trace; None if it does."""
    drafter = trace.meta.get("drafter_kind", "chain")
    if kind.drafter_kinds and drafter not in kind.drafter_kinds:
        return f"meant for drafters of kind {', '.join(kind.drafter_kinds)}; this trace's is {drafter}"
    if issubclass(kind, TreePolicy) and drafter == SPACE:
        return "the drafter of this trace drafts chains only"
    if issubclass(kind, TreePolicy) and trace.sampled_by_rejection:
        return "trees are replayed on greedy and Gumbel traces only; this one is of rejection sampling"
    missing = [name for name in kind.features if getattr(trace, name) is None]
    return f"needs {NEEDED.get(missing[0], f'the column {missing[0]!r}')}, which this trace lacks" if missing else None


NEEDED = {"tree": "recorded trees (`realrun record --tree-nodes`)"}


def check_replayable(trace: Trace, policy: Policy) -> None:
    """InputError if the policy asks for what the trace does not hold."""
    if policy.deepest > trace.depth:
        raise InputError(
            f"policy {policy} drafts up to {policy.deepest} tokens, the trace is recorded to depth "
            f"{trace.depth}; lower the limit or record deeper"
        )
    if isinstance(policy, TreePolicy):
        reason = why_not(trace, type(policy))
        if reason:
            raise InputError(f"policy {policy.name}: {reason}")
        if not policy.static and trace.tree is not None and policy.max_width > trace.tree.width:
            raise InputError(
                f"policy {policy} drafts up to {policy.max_width} children of a node, the trace is recorded to "
                f"{trace.tree.width}; lower the limit or record wider"
            )
        return
    for name in policy.features:
        if getattr(trace, name) is None:
            raise InputError(f"policy {policy.name} needs the column {name!r}, which this trace lacks; record it")


def check_covered(trace: Trace, policy: Policy, table: CostTable) -> None:
    """InputError if the replay could look up what the table does not hold; the kernel does not check."""
    longest = context_range(trace)[1]
    if table.verify_s.shape[1] <= longest >> table.bucket_bits or len(table.draft_s) <= policy.deepest:
        raise InputError(
            f"cost table covers drafts of up to {len(table.draft_s) - 1} tokens and contexts below "
            f"{table.verify_s.shape[1] << table.bucket_bits}, the replay of {policy} needs {policy.deepest} "
            f"and {longest}; compile it for this trace"
        )
    if isinstance(policy, ChainPolicy) and len(table.verify_s) < policy.max_draft_tokens + 2:
        raise InputError(
            f"cost table covers verification of up to {len(table.verify_s) - 1} tokens, the replay of {policy} needs "
            f"{policy.max_draft_tokens + 1}; compile it for this trace"
        )
    if isinstance(policy, TreePolicy):
        if table.tree is None:
            raise InputError(f"policy {policy.name}: these costs are not of trees; profile with `--tree-tokens`")
        covered, asked = len(table.tree.verify_s) - 1, max(policy.most_nodes + 1, policy.max_expanded)
        if covered < asked:
            raise InputError(
                f"costs cover trees of up to {covered} tokens, policy {policy} may need {asked}; lower its limit or "
                "profile with a larger `--tree-tokens`"
            )


def compiled(policy: Policy) -> Callable[..., int]:
    """The kernel bound to one policy: `run(trace, table, outcome, which, counts, seconds, rounds_log)`.

    `which` holds sequence indices [M] in the order to take them; counts int64 [M, COUNTS] and
    seconds float64 [M, 4] grow by what each took. Nothing is checked: see `check_replayable`,
    `check_covered`. Safe in threads that write to different arrays.
    """
    if isinstance(policy, TreePolicy):
        return run_tree(policy)
    assert isinstance(policy, ChainPolicy)
    return run_chain(policy)


def prepare(kind: type[Policy]) -> None:
    """Compile the kernel of this kind, or load it, before threads ask for it."""
    if issubclass(kind, TreePolicy):
        specialise_tree(kind)  # type: ignore[arg-type]  # a class hashes well
    elif issubclass(kind, ChainPolicy):
        specialise(kind)  # type: ignore[arg-type]


def replay(trace: Trace, policy: Policy, table: CostTable, *, seed: int = 0, log: bool = False) -> Replay:
    """Run one policy over a trace. Exact where the trace is (greedy or Gumbel-coupled).

    On a trace of rejection sampling all of the result sums over DRAWS outcomes of every
    sequence, but for the log, which is the first's; a policy's state starts anew with each
    outcome (`specsim.rejection`).
    """
    check_replayable(trace, policy)
    check_covered(trace, policy, table)
    counts = np.zeros((trace.sequences, COUNTS), dtype=np.int64)
    seconds = np.zeros((trace.sequences, 4))
    columns = LOG if isinstance(policy, TreePolicy) else 4
    rounds_log = np.zeros((len(trace.token) if log else 0, columns), dtype=np.int64)
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
        verified=counts[:, VERIFIED],
        truncated=counts[:, TRUNCATED] if isinstance(policy, TreePolicy) else None,
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


def context_share(trace: Trace, table: CostTable) -> npt.NDArray[np.float64]:
    """Share of the trace's positions in every column of the table [B], by which its costs are averaged."""
    context = np.repeat(trace.prompt_tokens - 1, trace.output_tokens) + trace.position
    columns = len(table.catch_up_s)
    counts = np.bincount(context >> table.bucket_bits, minlength=columns)[:columns]
    return np.asarray(counts / len(context), dtype=np.float64)


def compile_for(trace: Trace, model: CostModel, policy: Policy | None = None) -> CostTable:
    """The cost table of this policy on this trace; without one, of all policies that leave costs as they are."""
    model = cost_of(trace, model, policy)
    trees = trace.true_rank is not None and not isinstance(policy, ChainPolicy)
    return compile_table(model, max_draft_tokens=trace.depth, contexts=context_range(trace), trees=trees)


def cost_of(trace: Trace, model: CostModel, policy: Policy | None = None) -> CostModel:
    """What rounds of this policy cost on this trace; without one, the least that those of any policy do.

    SPACE's masks are part of every pass, so that the policy's longest draft decides what a pass costs.
    """
    if policy is not None:
        model = policy.cost(model)
    if trace.meta.get("drafter_kind") != SPACE:
        return model
    inner = model.model if isinstance(model, SpaceCost) else model
    return SpaceCost(inner, None if policy is None else policy.deepest, draft_steps=True)


def has_own_cost(trace: Trace, kind: type[Policy]) -> bool:
    """Whether rounds of this kind of policy cost what its settings make of them, and not the same for all."""
    return kind.cost is not Policy.cost or trace.meta.get("drafter_kind") == SPACE
