"""Replay many configurations of a policy on a trace, in parallel threads.

The compiled replay runs without the interpreter's lock, so threads share trace, draws and
cost table. A task takes several configurations through the trace block by block, so that a
block is fetched from memory once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.learn.fit import fit
from specsim.policy.base import Policy, Settings
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import bind_kernel
from specsim.replaying.rounds import RoundLog, Sums
from specsim.trace.trace import Trace

Result = TypeVar("Result")

TOGETHER = 32  # configurations of a task
BLOCK_ROWS = 1 << 14  # positions of a block; what a policy reads of them fits a core's second-level cache
TASK_ROWS = 1 << 18  # sequences times configurations of a task, which bounds its counts to 16 MB
MAX_TRUNCATED_SHARE = 0.02  # of a tree policy's rounds, where settings are chosen
MAX_REPORTED_SHARE = 0.1  # on other sequences, where a choice at that limit exceeds it by chance
TRUNCATED = "asks for more than the recorded trees hold"


def truncated_reason(trace: Trace, truncated_share: float) -> str | None:
    """Why a policy cannot be judged on this trace; None where its recorded trees are large enough.

    truncated_share : of the policy's rounds, those that asked for more than the recorded trees hold
    """
    if truncated_share <= MAX_REPORTED_SHARE:
        return None
    assert trace.tree is not None  # nothing else is truncated
    return (
        f"{TRUNCATED} in {100 * truncated_share:.0f} % of the rounds ({trace.tree.nodes} nodes, up to "
        f"{trace.tree.width} children each); record larger ones with `realrun record --tree-nodes "
        "--tree-width`"
    )


class Evaluator:
    """Replays configurations of a policy on a trace; draws and cost table are computed once.

    train : data for policies that learn; default: the trace itself
    jobs : threads (default: one per core)
    """

    def __init__(
        self,
        kind: type[Policy],
        priced: PricedTrace,
        *,
        fixed: Settings | None = None,
        train: PricedTrace | None = None,
        seed: int = 0,
        jobs: int | None = None,
    ) -> None:
        from joblib import cpu_count

        if jobs is not None and jobs < 1:
            raise InputError(f"jobs={jobs}; give at least 1 thread")
        self.kind, self.priced, self.trace = kind, priced, priced.trace
        self.fixed, self.train = dict(fixed or {}), train or priced
        self.jobs: int = jobs or cpu_count()
        self.seed = seed
        priced.table()  # before threads ask for it; says where the costs do not cover the trace

    @cached_property
    def baseline_s(self) -> Floats:
        """Autoregressive seconds per sequence [S]."""
        return self.priced.baseline_s

    def build(self, points: Sequence[Settings]) -> list[Policy | InputError]:
        """Build the policy of each point, or the error why trace or costs do not support it."""
        size = math.ceil(len(points) / (4 * self.jobs))
        tasks = [(points[i : i + size],) for i in range(0, len(points), max(1, size))]
        parts = self._parallel(lambda part: [self._build(point) for point in part], tasks)
        return [built for part in parts for built in part]

    def build_or_raise(self, point: Settings) -> Policy:
        """Build the policy of a point; raise InputError if trace or costs do not support it."""
        (policy,) = self.build([point])
        if isinstance(policy, InputError):
            raise policy
        return policy

    def _build(self, point: Settings) -> Policy | InputError:
        try:
            policy = fit(self.kind, {**self.fixed, **point}, self.train.trace, self.train.table())
            check_replayable(self.trace, policy)
            check_covered(self.trace, policy, self.priced.table(policy))
        except InputError as error:
            return error
        return policy

    def total_seconds(self, points: Sequence[Settings]) -> tuple[list[Policy | InputError], Floats]:
        """Build the policy of each point, and return its seconds on the whole trace; infinite where it is refused."""
        built = self.build(points)
        total = np.full(len(points), np.inf)
        total[[isinstance(policy, Policy) for policy in built]] = self.seconds(
            [policy for policy in built if isinstance(policy, Policy)]
        ).sum(axis=1)
        return built, total

    def seconds(self, policies: Sequence[Policy]) -> Floats:
        """Return speculative seconds [C, S] of built policies.

        Infinite for a tree policy that asks for more than the recorded trees hold in a share of its rounds above
        MAX_TRUNCATED_SHARE, because such a replay costs too little to be compared. Independent of threads and blocks,
        and equal to `replay`'s.
        """
        which = np.arange(self.trace.sequences)
        result = np.empty((len(policies), len(which)))
        rounds = np.zeros((len(policies), len(which), 2), dtype=np.int64)  # all, and truncated ones
        if not policies:
            return result
        size = max(1, min(TOGETHER, math.ceil(len(policies) / self.jobs), TASK_ROWS // len(which)))
        starts = range(0, len(policies), size)
        parts = 1
        if not any(policy.carries_state for policy in policies):
            parts = min(len(which), math.ceil(self.jobs / len(starts)))
        cuts = np.linspace(0, len(which), parts + 1).astype(int).tolist()
        self._compile(policies[0])
        tasks = [
            (policies[i : i + size], which[a:b], result[i : i + size, a:b], rounds[i : i + size, a:b])
            for i in starts
            for a, b in pairwise(cuts)
        ]
        self._parallel(self._replay_all, tasks)
        every, truncated = rounds.sum(axis=1).T
        result[truncated > MAX_TRUNCATED_SHARE * every] = np.inf
        return result

    def _compile(self, policy: Policy) -> None:
        """Compile, or load, ahead of the threads; this replays nothing."""
        nothing = np.zeros(0, dtype=np.int64), Sums.zeros(0), RoundLog.zeros(0)
        bind_kernel(policy)(self.trace, self.priced.table(), self.seed, *nothing)

    def _replay_all(self, policies: Sequence[Policy], which: Ints, result: Floats, rounds: Ints) -> None:
        rows = np.cumsum(self.trace.output_tokens[which])
        cuts = np.unique(np.searchsorted(rows, np.arange(BLOCK_ROWS, rows[-1], BLOCK_ROWS)))
        blocks = np.unique([0, *cuts.tolist(), len(which)]).tolist()
        sums = Sums.zeros(len(policies), len(which))
        runs = [(bind_kernel(policy), self.priced.table(policy), policy.carries_state) for policy in policies]
        no_log = RoundLog.zeros(0)
        for a, b in pairwise(blocks):
            for i, (run, table, carries_state) in enumerate(runs):
                if not carries_state:
                    run(self.trace, table, self.seed, which[a:b], sums.at(np.s_[i, a:b]), no_log)
                elif a == 0:  # its sequences belong together
                    run(self.trace, table, self.seed, which, sums.at(i), no_log)
        sums.seconds.sum(axis=2, out=result)
        rounds[:] = np.stack([sums.num_rounds, sums.truncated], axis=2)

    def _parallel(self, call: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]) -> Iterable[Result]:
        if self.jobs == 1 or len(tasks) <= 1:
            return [call(*task) for task in tasks]
        from joblib import Parallel, delayed

        run = Parallel(n_jobs=self.jobs, backend="threading", batch_size=1, pre_dispatch="all")
        results: list[Result] = run(delayed(call)(*task) for task in tasks)
        return results


@dataclass(frozen=True)
class Evaluated:
    """Configurations on a trace, in the order asked.

    policies : None where trace or costs cannot serve it, for the reason of that place in `reasons`
    seconds : float64 [C], speculative, summed over sequences; infinite where there is no policy, or the
        recorded trees are too small for it
    baseline_s : autoregressive seconds of the same
    """

    policies: list[Policy | None]
    reasons: list[str | None]
    seconds: Floats
    baseline_s: float

    @property
    def speedup(self) -> Floats:
        """Baseline seconds over speculative seconds [C]; 0 where they are infinite."""
        return self.baseline_s / self.seconds


def evaluate_many(
    kind: type[Policy],
    settings_list: Sequence[Settings],
    priced: PricedTrace,
    *,
    train: PricedTrace | None = None,
    seed: int = 0,
    jobs: int | None = None,
) -> Evaluated:
    """Replay many configurations of a policy on a trace, in parallel threads.

    train : data for policies that learn; default: the trace itself
    jobs : threads (default: one per core). Does not change the result.

    Raises InputError if the costs do not cover the trace at all.
    """
    evaluator = Evaluator(kind, priced, train=train, seed=seed, jobs=jobs)
    built, seconds = evaluator.total_seconds(settings_list)
    return Evaluated(
        policies=[p if isinstance(p, Policy) else None for p in built],
        reasons=[str(p) if isinstance(p, InputError) else None for p in built],
        seconds=seconds,
        baseline_s=float(evaluator.baseline_s.sum()),
    )
