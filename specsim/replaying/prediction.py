"""Predictions from replays: speedup with its interval, rates and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.acceptance import formulas as metrics
from specsim.cost.joined import JoinedTable
from specsim.io.arrays import Floats
from specsim.policy.base import Policy
from specsim.policy.switch.base import SwitchPolicy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.intervals import Estimate, interval_columns, ratio_interval
from specsim.replaying.oracles import chain_oracle_seconds, switch_oracle_seconds, tree_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.trace.joined import JoinedTrace

if TYPE_CHECKING:
    import pandas as pd

STATIC_WIDTH = 10  # children of a node that searches of static trees go to


COLUMNS = (  # of a prediction's table, beside policy and speedup
    "v_d", "r_d", "hm", "tau", "rounds", "drafted", "accepted", "verified", "output_tokens", "seconds", "ar_seconds",
    "oracle_regret", "eq14",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Prediction:
    """Predicted speedup, rates and counts of a policy on a trace under a cost model.

    Counts and seconds are those of all sequences; expected counts are given to the nearest whole number.

    verified : drafted tokens that the target verified; all of them in a chain, unless its policy drops some
    truncated_rounds : rounds in which a tree policy asked for nodes that the trace does not hold; None of a chain
    oracle_regret : seconds over those of the oracle (`specsim.replaying.oracles`) less 1, all sequences
        together, under the cost model as it is; None where no oracle was asked. Below 0 only
        for a policy that reshapes the cost of a round.
    cost_notes : notes of the cost model on its seconds, such as that they are extrapolated
    cost_ratio : T_d / T_t, time of a draft step over that of a target pass, by these costs; None of trees, of SPACE and
        of several drafters
    """

    policy: Policy
    speedup: Estimate
    v_d: float
    r_d: float
    hm: float
    tau: float
    rounds: int
    drafted: int
    accepted: int
    verified: int
    truncated_rounds: int | None
    output_tokens: int
    seconds: float
    ar_seconds: float
    oracle_regret: float | None = None
    cost_notes: tuple[str, ...] = ()
    cost_ratio: float | None = None

    @property
    def eq14(self) -> float | None:
        """The speedup by EESD's Eq. 14 (arXiv:2406.03853), from v_d, r_d and `cost_ratio` alone; None without a ratio.

        It leaves out whatever is not a draft step or a target pass of a single token.
        """
        return None if self.cost_ratio is None else float(metrics.eq14_speedup(self.v_d, self.r_d, self.cost_ratio))

    @property
    def truncated_share(self) -> float:
        """Share of rounds that asked for nodes that the trace does not hold; 0 of a chain."""
        return (self.truncated_rounds or 0) / self.rounds

    @property
    def notes(self) -> list[str]:
        """Caveats of these numbers, in words."""
        asked = f"{self.truncated_rounds} of {self.rounds} rounds asked for more than the recorded trees hold"
        return [*([asked] if self.truncated_rounds else []), *self.cost_notes]

    def __repr__(self) -> str:
        rates = f"v_d {self.v_d:.3f}, r_d {self.r_d:.3f}, tau {self.tau:.2f} tokens per round"
        title = "; ".join([str(self.policy), *self.notes])
        return f"{title}\nspeedup {self.speedup} (95 % interval), {rates}"

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row: policy, speedup with its 95 % interval, rates, counts in tokens and rounds, seconds."""
        import pandas as pd  # slow to import, and a prediction does not need it

        named = {name: getattr(self, name) for name in COLUMNS}
        return pd.DataFrame([{"policy": str(self.policy), **interval_columns(self.speedup), **named}])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: plain numbers, units as in the attribute names."""
        return {
            "policy": self.policy.name,
            "params": self.policy.settings,
            "speedup": self.speedup.as_dict(),
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Prediction)[2:]},
            "cost_notes": list(self.cost_notes),
            "eq14": self.eq14,
        }


def summarise(result: Replay, oracle_s: Floats | None = None) -> Prediction:
    """Summarise a replay: totals, rates and the bootstrap interval of the speedup.

    oracle_s : the oracle's seconds per sequence [S] on the same trace, for the regret
    """
    drafted, accepted = float(result.drafted.sum()), float(result.accepted.sum())
    output, rounds = float(result.output_tokens.sum()), float(result.num_rounds.sum())
    v_d = float(metrics.draft_precision(accepted, drafted))
    r_d = float(metrics.draft_recall(accepted, output))
    return Prediction(
        policy=result.policy,
        speedup=ratio_interval(result.autoregressive_s, result.speculative_s),
        v_d=v_d,
        r_d=r_d,
        hm=float(metrics.harmonic_mean(v_d, r_d)),
        tau=float(metrics.tokens_per_round(output, rounds)),
        rounds=round(rounds),
        drafted=round(drafted),
        accepted=round(accepted),
        output_tokens=round(output),
        seconds=float(result.seconds.sum()),
        ar_seconds=float(result.autoregressive_s.sum()),
        verified=round(float(result.verified.sum())),
        truncated_rounds=None if result.truncated is None else int(result.truncated.sum()),
        oracle_regret=None if oracle_s is None else float(result.seconds.sum() / oracle_s.sum() - 1),
        cost_notes=result.cost_notes,
        cost_ratio=result.cost_ratio,
    )


def oracle_seconds(priced: PricedTrace, kinds: Iterable[type[Policy]], *, width: int = STATIC_WIDTH) -> Floats:
    """Compute the oracle's seconds per sequence [S] among chains, trees, or both, as the kinds are.

    width : most children of a node of a tree; at least those recorded, and static trees may have more
    """
    trace, table = priced.trace, priced.table()
    if isinstance(trace, JoinedTrace):
        assert isinstance(table, JoinedTable)
        return switch_oracle_seconds(trace, table)
    trees = [issubclass(kind, TreePolicy) for kind in kinds]
    found = []
    if any(trees):
        recorded = 0 if trace.tree is None else trace.tree.width
        found.append(tree_oracle_seconds(trace, table, max(width, recorded)))
    if not all(trees):
        found.append(chain_oracle_seconds(trace, table))
    least: Floats = np.minimum.reduce(found)
    return least


def oracle_name(kinds: Iterable[type[Policy]]) -> str:
    """Name what the oracle of these kinds chooses among."""
    kinds = list(kinds)
    if any(issubclass(kind, SwitchPolicy) for kind in kinds):
        return "drafters and chains"
    trees = [issubclass(kind, TreePolicy) for kind in kinds]
    return "trees" if all(trees) else "chains and trees" if any(trees) else "chains"


def oracle_width(policy: Policy) -> int:
    """Return the children per node that the oracle needs to bound this policy."""
    return max(STATIC_WIDTH, policy.max_width) if isinstance(policy, TreePolicy) else STATIC_WIDTH


def predict_policy(priced: PricedTrace, policy: Policy, *, seed: int = 0) -> Prediction:
    """Replay a policy under its own cost of a round, and compare it with the oracle under the cost model."""
    replayed = priced.replay(policy, seed=seed)  # first, because it checks trace and costs
    return summarise(replayed, oracle_seconds(priced, [type(policy)], width=oracle_width(policy)))
