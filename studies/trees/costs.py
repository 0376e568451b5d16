"""What rounds cost in this study: as measured, as a paper says, and as on an accelerator with little to spare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.arrays import Seconds
from specsim.cost.model import ConstantCost, CostModel
from specsim.cost.profile import read_cost

MEASURED, PAPER, KNEE = "measured costs", "paper's costs", "knee"


@dataclass(frozen=True)
class KneeCost(ConstantCost):
    """A roofline of one corner: a pass takes as long as reading the weights, s_d or s_t, up to `knee_tokens` tokens.

    Beyond, arithmetic takes longer than reading, and time grows in proportion to the tokens.
    """

    knee_tokens: int = 32

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_t * self._factor(n_tokens))

    def wider(self, n_nodes: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.s_d * (self._factor(n_nodes) - 1))

    def _factor(self, tokens: int) -> float:
        return max(1.0, tokens / self.knee_tokens)


def costs_of(folder: Path, config: Mapping[str, Any]) -> dict[str, CostModel]:
    """The cost models of one run's boards, by name."""
    s_d, s_t = config["paper"]["s_d"], config["paper"]["s_t"]
    return {
        MEASURED: read_cost(folder / "profile.json"),
        PAPER: ConstantCost(s_d, s_t),
        KNEE: KneeCost(s_d, s_t, config["knee"]["tokens"]),
    }
