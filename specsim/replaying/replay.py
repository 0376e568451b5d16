"""Replay a dense trace under a policy: round for round what a real run would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.cost.table import CostTable, autoregressive_seconds, decode_seconds
from specsim.io.arrays import Array, Floats, Ints
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.chain import bind_chain, chain_kernel
from specsim.replaying.checks import check_covered, check_replayable
from specsim.replaying.rounds import PARTS, RoundLog, Sums
from specsim.replaying.switch import bind_switch, switch_kernel
from specsim.replaying.tree import bind_tree, tree_kernel
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)  # of arrays, as `Trace` is
class Replay:
    """Counts and seconds per sequence of a policy on a trace.

    num_rounds, drafted, accepted, policy_steps, output_tokens : int64 [S]
    verified : int64 [S], tokens in the target's passes beside the pending ones; a chain's are all drafted ones, unless
        its policy drops some
    truncated : int64 [S], rounds in which a tree policy asked for nodes that the trace does not hold and that might
        have been verified; the replay goes on as if they had not been drafted; None of a chain
    seconds : float64 [S, 4], in `PARTS`
    autoregressive_s : float64 [S], the baseline on the same sequences
    rounds : every round; None without `log`
    cost_notes : notes of the cost model on its seconds
    cost_ratio : T_d / T_t of the costs, where `eq14_speedup` takes it; see `eq14_ratio`
    """

    policy: Policy
    num_rounds: Ints
    drafted: Ints
    accepted: Ints
    policy_steps: Ints
    output_tokens: Ints
    seconds: Floats
    autoregressive_s: Floats
    rounds: RoundLog | None
    verified: Ints
    truncated: Ints | None = None
    cost_notes: tuple[str, ...] = ()
    cost_ratio: float | None = None

    @property
    def speculative_s(self) -> Floats:
        """Seconds per sequence, all parts."""
        total: Floats = self.seconds.sum(axis=1)
        return total

    @property
    def columns(self) -> dict[str, Array]:
        """Arrays with a value per sequence, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row per sequence: counts, tokens, seconds of each part and of the baseline."""
        import pandas as pd  # slow to import, and a replay does not need it

        counts = {name: values for name, values in self.columns.items() if values.ndim == 1}
        parts = {f"{part}_s": self.seconds[:, number] for number, part in enumerate(PARTS)}
        return pd.DataFrame({**counts, **parts, "speedup": self.autoregressive_s / self.speculative_s})

    @property
    def speedup(self) -> float:
        """Baseline seconds over speculative seconds, summed over sequences."""
        return float(self.autoregressive_s.sum() / self.seconds.sum())


class Loop(NamedTuple):
    """How policies of a kind are replayed: compile the kernel of a class, bind it to a policy."""

    compile: Callable[[Any], Callable[..., int]]
    bind: Callable[[Any], Callable[..., int]]


LOOPS: dict[type[Policy], Loop] = {
    ChainPolicy: Loop(chain_kernel, bind_chain),
    SwitchPolicy: Loop(switch_kernel, bind_switch),
    TreePolicy: Loop(tree_kernel, bind_tree),
}


def _loop(kind: type[Policy]) -> Loop:
    return next(LOOPS[base] for base in kind.__mro__ if base in LOOPS)


def bind_kernel(policy: Policy) -> Callable[..., int]:
    """Bind the kernel to a policy: `run(trace, table, seed, which, sums, log)`.

    `which` holds sequence indices [M] in the order to replay them; the sums [M] grow by what each took.
    Nothing is checked: see `check_replayable`, `check_covered`. Safe in threads that write to different arrays.
    """
    return _loop(type(policy)).bind(policy)


def compile_kernel(kind: type[Policy]) -> None:
    """Compile or load the kernel of this kind of policy before threads ask for it."""
    _loop(kind).compile(kind)


def replay(trace: Trace, policy: Policy, table: CostTable, *, seed: int = 0, log: bool = False) -> Replay:
    """Replay a trace under a policy: the rounds of a real run.

    Drafts, acceptance and output of a trace of rejection sampling are one draw from a real run's distribution, so
    the replay is unbiased there; a real run draws others.
    """
    check_replayable(trace, policy)
    check_covered(trace, policy, table)
    sums = Sums.zeros(trace.sequences)
    rounds = RoundLog.zeros(len(trace.token) if log else 0)
    written = bind_kernel(policy)(trace, table, seed, np.arange(trace.sequences), sums, rounds)
    if log:
        rounds = rounds[:written]
        context = trace.prompt_tokens[rounds.sequence] - 1 + rounds.t
        emitted = np.minimum(rounds.accepted + 1, trace.output_tokens[rounds.sequence] - rounds.t)
        rounds.baseline_s[:] = decode_seconds(trace, table, context, emitted)
    return Replay(
        policy=policy,
        num_rounds=sums.num_rounds,
        drafted=sums.drafted,
        accepted=sums.accepted,
        policy_steps=sums.policy_steps,
        output_tokens=trace.output_tokens.astype(np.int64),
        seconds=sums.seconds,
        autoregressive_s=autoregressive_seconds(trace, table),
        rounds=rounds if log else None,
        verified=sums.verified,
        truncated=sums.truncated if isinstance(policy, TreePolicy) else None,
        cost_notes=table.notes,
        cost_ratio=eq14_ratio(policy, table),
    )


def eq14_ratio(policy: Policy, table: CostTable) -> float | None:
    """Return T_d / T_t of these costs for EESD's Eq. 14.

    None where drafted tokens do not take a draft pass each, in trees and in SPACE, or there are several drafters.
    """
    return table.step_ratio if isinstance(policy, ChainPolicy) and not table.masks else None
