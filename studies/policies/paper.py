"""PCT beside EAGLE-2 as EDD + PCT's paper compares them: nodes verified and acceptance length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from specsim.cost.model import ConstantCost
from specsim.policy.base import Policy
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.pct import PCT
from specsim.replaying.intervals import Comparison, Estimate, ratio_difference, ratio_interval
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from studies.common import MOST_TRUNCATED
from studies.paper_costs import MOST_NODES

Document = Mapping[str, Any]

ANY_COST = ConstantCost(1.0, 1.0)  # plays no part in counts
ABOUT_HALF = (0.4, 0.6)  # of the nodes
COMPARABLE = 0.95  # of the acceptance length


@dataclass(frozen=True)
class Rounds:
    """A policy's rounds on a trace, counted by sequence [S].

    verified_nodes : beside the pending tokens; truncated_rounds : those that asked for more than was recorded
    """

    num_rounds: list[int]
    output_tokens: list[int]
    verified_nodes: list[int]
    truncated_rounds: list[int]

    @classmethod
    def of(cls, trace: Trace, policy: Policy) -> Self:
        """Replay the policy on the trace."""
        replay = PricedTrace(trace, ANY_COST).replay(policy)
        truncated = np.zeros_like(replay.num_rounds) if replay.truncated is None else replay.truncated
        counts = (replay.num_rounds, replay.output_tokens, replay.verified, truncated)
        return cls(*(column.tolist() for column in counts))

    @property
    def tau(self) -> Estimate:
        """Mean acceptance length, tokens a round."""
        return ratio_interval(self.output_tokens, self.num_rounds)

    @property
    def verified(self) -> Estimate:
        """Nodes verified a round."""
        return ratio_interval(self.verified_nodes, self.num_rounds)

    @property
    def truncated(self) -> float:
        """Share of rounds that asked for more than the recorded trees hold."""
        return sum(self.truncated_rounds) / sum(self.num_rounds)


@dataclass(frozen=True)
class PaperComparison:
    """PCT with the paper's values beside EAGLE-2, on all sequences because nothing is tuned."""

    pct: Rounds
    eagle2: Rounds

    @classmethod
    def of(cls, trace: Trace, config: Document) -> Self:
        """Replay both on the trace."""
        return cls(Rounds.of(trace, paper_pct(config)), Rounds.of(trace, Eagle2()))

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Read what `dataclasses.asdict` wrote."""
        return cls(**{field.name: Rounds(**document[field.name]) for field in dataclasses.fields(cls)})

    @property
    def node_share(self) -> float:
        """PCT's nodes over EAGLE-2's."""
        return self.pct.verified.estimate / self.eagle2.verified.estimate

    @property
    def tau_ratio(self) -> float:
        """PCT's acceptance length over EAGLE-2's."""
        return self.pct.tau.estimate / self.eagle2.tau.estimate

    @property
    def comparable(self) -> bool:
        """Whether the record holds what both ask for."""
        return max(self.pct.truncated, self.eagle2.truncated) <= MOST_TRUNCATED

    def nodes_beyond(self, share: float) -> Comparison:
        """Nodes that PCT verifies a round less this share of EAGLE-2's."""
        return self._beyond(share, self.pct.verified_nodes, self.eagle2.verified_nodes)

    def tau_beyond(self, share: float) -> Comparison:
        """PCT's acceptance length less this share of EAGLE-2's."""
        return self._beyond(share, self.pct.output_tokens, self.eagle2.output_tokens)

    def _beyond(self, share: float, pct: Sequence[int], eagle2: Sequence[int]) -> Comparison:
        return ratio_difference(pct, self.pct.num_rounds, share * np.asarray(eagle2), self.eagle2.num_rounds)

    @property
    def text(self) -> str:
        """Sentence with both shares and what the prompts decide about them (95 %)."""
        if not self.comparable:
            return "PCT is not compared with EAGLE-2: too few nodes were recorded."
        least, most = (_side(self.nodes_beyond(share)) for share in ABOUT_HALF)
        nodes = {(-1, -1): "fewer than half", (1, -1): "about half", (1, 1): "more than half"}.get((least, most))
        length = {-1: "shorter", 1: "comparable"}.get(_side(self.tau_beyond(COMPARABLE)))
        return (
            f"PCT with its paper's settings verifies {100 * self.node_share:.0f} % of EAGLE-2's nodes "
            f"({nodes or 'not significant'}) at {100 * self.tau_ratio:.1f} % of its acceptance length "
            f"({length or 'not significant'})."
        )


def paper_pct(config: Document) -> PCT:
    """Return PCT as its paper runs it, but for a bound on verified nodes, which the paper's costs need."""
    paper = config["paper"]
    settings = {key: paper[key] for key in ("width", "max_depth", "leaf_threshold")}
    return PCT(cost_ratio=paper["s_d"] / paper["s_t"], max_nodes=MOST_NODES, **settings)


def _side(comparison: Comparison) -> int:
    """Return on which side of 0 the interval lies; 0 where it holds it."""
    return (comparison.difference.low > 0) - (comparison.difference.high < 0)
