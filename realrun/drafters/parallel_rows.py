"""Drafters whose tokens of a round are all predicted at once (MEDUSA, SPACE), behind the interface of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch

from realrun.lm.cached import CachedLM, Describe
from realrun.lm.head import logits_type
from realrun.lm.static.graphs import Recorded, Results
from realrun.lm.static.llama import StaticLlama
from realrun.lm.static.sizes import Mirrored
from specsim.io.errors import InputError


class ParallelRowsLM(CachedLM):
    """A model whose i-th pass of a round gives row i of that round's logits.

    Over a static target the rows lie at fixed addresses: `logits` [rows, V] and `states` [rows, d]. CUDA graphs read
    them there.

    target : the target's pass, which the length follows
    static : the static pass of the target that gives the rows; None for another pass
    rows, vocabulary, size : of the logits and states
    """

    predictors: ClassVar[str]  # the name for errors, such as "MEDUSA heads"
    fill_rows: Callable[[], Results] | None = None  # what writes the fixed addresses, if it can be recorded

    def __init__(self, target: CachedLM, static: CachedLM, rows: int, vocabulary: int, size: int):
        self.target, self.describes = target, static.describes
        super().__init__(target.model)
        if isinstance(static, StaticLlama):
            self.logits = torch.zeros(rows, vocabulary, dtype=logits_type(self.model), device=self.device)
            self.states = torch.zeros(rows, size, dtype=self.model.dtype, device=self.device)
            self._position = Mirrored([1], torch.int64, self.device)  # of the pending token in the text
            self._position_on_device: int | None = None
            self.recorded = Recorded(static.recorded.graphs)

    @abstractmethod
    def _round(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Look up the round's logits [rows, V], and the states [rows, d] behind them where those are kept."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows of this round."""

    def warm_description(self, sizes: Iterable[int], describe: Describe) -> None:
        for row in range(len(self.logits)):
            self._describe_row(row, 0, describe)

    def forget_description(self, describe: Describe) -> None:
        self.recorded.forget(describe)

    def _describe(self, tokens: Sequence[int], describe: Describe, follows: bool) -> torch.Tensor:
        row = self._next_row()
        self.hidden = self.states[row : row + 1]
        return self._describe_row(row, self.target.length, describe)

    def _describe_row(self, row: int, position: int, describe: Describe) -> torch.Tensor:
        """Compute statistics [c] of a row, in a round whose pending token has this position.

        The first row's graph also fills all rows, where `fill_rows` is given.
        """
        if position != self._position_on_device:
            self._position.put(position)
            self._position_on_device = position

        def run() -> Results:
            if row == 0 and self.fill_rows is not None:
                self.fill_rows()
            here = slice(row, row + 1)
            return (describe(self.logits[here], self._position.tensor + row, self.states[here]),)

        return self.recorded.run((row, describe), run)[0]

    def _next_row(self) -> int:
        if self.step == self.rows:
            raise InputError(
                f"{self.step} {self.predictors} draft at most {self.step} tokens; lower the policy's limit"
            )
        self.step += 1
        return self.step - 1

    def reset(self) -> None:
        self.length = self.nodes = self.step = 0
        self.hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start a round: the target has fed these tokens."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        self.length, self.nodes, self.step = self.target.length, 0, 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        self.truncate(0)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        return self._logits(1)

    def _logits(self, count: int) -> torch.Tensor:
        """Give logits [count, V] of the next row, the same in every row."""
        row = self._next_row()
        logits, states = self._round()
        if self.keep_hidden:
            self.hidden = None if states is None else states[row : row + 1]
        return logits[row].expand(count, -1)
