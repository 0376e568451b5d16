"""What EDD's and EAGLE's passes over static caches share: rows made of the target's states, and rows of their own.

Given rows come in any number, as rounds accept any, and a graph is made for every number of rows: they are filled up to
a power of 2. What is too much lies behind the row that is fed next, or is overwritten by it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from realrun.drafters.static.inside import InsideTarget
from realrun.lm.static.llama import MAX_STEP_TOKENS
from realrun.lm.static.sizes import Rows, Size
from realrun.lm.static.split import StaticSplitTarget

MOST_GIVEN = 32  # rows that come with a pass; more are filled in ahead of it, as for a prompt
GIVEN = (1, 2, 4, 8, 16, MOST_GIVEN)


class Given(NamedTuple):
    """The variant of a pass that fills so many given rows first; `true` where its own row is made of a state too."""

    rows: int
    true: bool


class StaticStateDrafter(InsideTarget):
    """One layer behind a split target. `length` counts the given rows and, during a round, the own ones behind them.

    given : rows made of the target's states
    """

    reads_target_states = True

    def __init__(self, target: StaticSplitTarget, model: Any):
        self.target = target
        self._given_sizes: dict[int, Size] = {}
        super().__init__(target, model)

    def reset(self) -> None:
        super().reset()
        self.given = 0

    def truncate(self, length: int) -> None:
        """Keep given rows alone, `length` at most."""
        self.given = min(self.given, length)
        self.length, self.nodes = self.given, 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        """The target will give rows for them."""
        self.truncate(self.given)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length + MOST_GIVEN)
        super().reserve(length + MOST_GIVEN)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        self.reserve(self.length + len(tokens))
        own, first, variant = self._open(tokens)
        if own:
            assert len(own) <= MAX_STEP_TOKENS, "own rows are those of a draft"
            return self._step(self._chain(len(own)), own, first, variant)[-keep:]
        assert isinstance(variant, Given)
        if variant.rows:
            self.recorded.run(variant, lambda: (self._fill_given(variant),))
        return self.embedding.new_empty(0, self.head.out_features)

    @abstractmethod
    def _given_input(self, rows: Rows) -> torch.Tensor:
        """What given rows begin with, [N, d]."""

    def _get_ready(self, tokens: Sequence[int], start: int) -> int:
        """Tell the pass to come of the given rows of these tokens, from slot `start` on; how many it fills."""
        if not tokens:
            return 0
        if len(tokens) > MOST_GIVEN:
            slots = torch.arange(start, start + len(tokens), device=self.device)
            rows = self.stack.rows_at(slots, self.stack.attend_up_to(start, None))
            rows = rows._replace(tokens=torch.tensor([tokens], device=self.device))
            self.stack.fill(self._given_input(rows), rows)
            return 0
        count = next(size for size in GIVEN if size >= len(tokens))
        self._given_size(count).packed.put([*tokens, *[0] * (count - len(tokens)), start])
        return count

    def _given_size(self, count: int) -> Size:
        if count not in self._given_sizes:  # beside those of own rows, as both are in one pass
            self._given_sizes[count] = Size(1, count, count, self.device)
        return self._given_sizes[count]

    def _fill_given(self, variant: Given) -> torch.Tensor:
        """The given rows' keys and values enter their slots; the slots [N]."""
        rows = self._given_size(variant.rows).rows()
        # Rows too many may stand beyond the model's positions.
        rows = rows._replace(positions=rows.positions.clamp(max=self.max_positions - 1))
        self.stack.fill(self._given_input(rows), rows)
        return rows.slots
