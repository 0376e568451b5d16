"""Costs of rounds in replays: measured, those of EDD + PCT's paper, and a roofline with a knee."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.cost.model import MAX_TREE_TOKENS, ConstantCost, CostModel
from specsim.io.arrays import Seconds

MEASURED, PAPER, KNEE = "measured costs", "paper's costs", "knee"
MOST_NODES = 64  # of a tree that is compared at the paper's costs


@dataclass(frozen=True)
class PaperCost(ConstantCost):
    """s_d and s_t a pass, `overhead_s` a round beside its passes, and `node_s` a verified token but the pending.

    Trees of more than `MOST_NODES` nodes are not covered: what they would cost is not known (errata B11, B13).
    """

    overhead_s: float = 0.0
    node_s: float = 0.0

    @property
    def max_tree_tokens(self) -> int:
        return MOST_NODES + 1

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t + self.node_s * (n_tokens - 1))

    def round_overhead(self) -> float:
        return self.overhead_s


@dataclass(frozen=True)
class KneeCost(ConstantCost):
    """A roofline with a knee: a pass takes as long as reading the weights, s_d or s_t, up to `knee_tokens` tokens.

    Beyond, arithmetic takes longer than reading, and time grows in proportion to the tokens. A round has an overhead.
    """

    overhead_s: float = 0.0
    knee_tokens: int = 32

    @property
    def max_tree_tokens(self) -> int:
        return MAX_TREE_TOKENS

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t * self._factor(n_tokens))

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_d * (self._factor(n_nodes) - 1))

    def round_overhead(self) -> float:
        return self.overhead_s

    def _factor(self, tokens: int) -> float:
        return max(1.0, tokens / self.knee_tokens)


def paper_costs(config: Mapping[str, Any]) -> dict[str, CostModel]:
    """The cost models that need no machine, by name."""
    paper = config["paper"]
    s_d, s_t, overhead_s = paper["s_d"], paper["s_t"], paper["overhead_s"]
    return {
        PAPER: PaperCost(s_d, s_t, overhead_s, paper["node_s"]),
        KNEE: KneeCost(s_d, s_t, overhead_s, config["knee"]["tokens"]),
    }
