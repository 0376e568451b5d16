"""Drafters that say all of a round's tokens at once: rows of logits, described one by one from fixed addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realrun.lm.cached import CachedLM, Describe
from realrun.lm.head import logits_type
from realrun.lm.static.graphs import Graphs, Recorded, Results
from realrun.lm.static.sizes import Mirrored


class RoundRows:
    """Logits [rows, V] of a round and the states behind them [rows, d]."""

    def __init__(self, lm: CachedLM, graphs: Graphs | None, rows: int, vocabulary: int, size: int):
        self.logits = torch.zeros(rows, vocabulary, dtype=logits_type(lm.model), device=lm.device)
        self.states = torch.zeros(rows, size, dtype=lm.model.dtype, device=lm.device)
        self._position = Mirrored([1], torch.int64, lm.device)  # of the pending token in the text
        self._known: int | None = None
        self.recorded = Recorded(graphs)

    def describe(
        self, row: int, position: int, describe: Describe, fill: Callable[[], object] | None = None
    ) -> torch.Tensor:
        """What is said of a row, [c], in a round whose pending token stands at this position.

        fill : writes the rows ahead of the first, in the same launch
        """
        if position != self._known:
            self._position.put(position)
            self._known = position

        def run() -> Results:
            if fill is not None:
                fill()
            here = slice(row, row + 1)
            return (describe(self.logits[here], self._position.tensor + row, self.states[here]),)

        return self.recorded.run((row, fill is None, describe), run)[0]
