"""Drafters of a single layer that read the target's states: the common part of EDD and EAGLE.

State rows are made of the target's states of all verified tokens. During a round there are draft rows behind them,
which the drafter makes by itself and which are dropped at the end of the round. The next round starts by making state
rows of the states that verification has left in the target (`realrun.lm.split_target`).

Over static caches, state rows come in any number because rounds accept any number of tokens, and each number of rows
takes a CUDA graph of its own. They are therefore filled up to a power of 2: the surplus lies behind the row that is fed
next, or is overwritten by it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from realrun.drafters.kind import StaticInsideTarget
from realrun.lm.head import logits_type
from realrun.lm.layer_stack import LayerStack, ModelParts, PartsLM
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.llama import MAX_STEP_TOKENS
from realrun.lm.static.sizes import Rows, Size
from realrun.lm.static.split import StaticSplitTarget

MAX_STATE_ROWS = 32  # state rows that come with a pass; more are filled in ahead of it, as for a prompt
STATE_ROWS = (1, 2, 4, 8, 16, MAX_STATE_ROWS)


class StateRows:
    """Mixed into both passes. `length` counts the state rows and, during a round, the draft rows behind them.

    state_rows : number of rows made of the target's states
    """

    reads_target_states = True
    length: int
    nodes: int
    hidden: torch.Tensor | None

    @property
    def shift(self) -> int:
        """How many slots before its position in the text a row stands: 1 where the first token has no row."""
        return 0

    def reset(self) -> None:
        self.length = self.nodes = self.state_rows = 0
        self.hidden = None

    def truncate(self, length: int) -> None:
        """Keep state rows alone, `length` at most."""
        self.state_rows = min(self.state_rows, length)
        self.length, self.nodes = self.state_rows, 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        """Drop all draft rows; the target will make state rows of the accepted nodes."""
        self.truncate(self.state_rows)


class StateDrafterLM(StateRows, PartsLM):
    """A layer over the states of a split target, in the form of any model that comes in parts.

    `forward` gives logits [m, V] after the last m tokens, at least after the last that is not yet verified.
    """

    def __init__(self, target: SplitTarget, model: Any, parts: ModelParts, layers: Sequence[Any]):
        self.target, self.parts = target, parts
        self.stack: LayerStack = parts.stack(layers)
        super().__init__(model)

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        """Append nodes, see `CachedLM.append_rows`; rows that see no other node are pending tokens of rounds."""
        logits = self._draft_rows(tokens, positions, seen, roots=True)
        self.nodes += len(tokens)
        if keep and self.hidden is not None:
            self.hidden = self.hidden[-keep:]
        return logits[-keep:] if keep else logits

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        cached = torch.ones(len(tokens), self.length, dtype=torch.bool)
        positions = [self.length + depth for depth in depths]
        return self._draft_rows(tokens, positions, torch.cat([cached, visible], dim=1), roots=False)

    @abstractmethod
    def _draft_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, roots: bool
    ) -> torch.Tensor:
        """Compute logits [n, V] after n new nodes, whose keys and values enter slots behind all others.

        seen : bool [n, length + nodes + n]
        roots : whether nodes that see no other node are pending tokens, not children of the last cached token
        """

    def _no_logits(self) -> torch.Tensor:
        """Make logits of no row, [0, V]."""
        return torch.empty(0, int(self.model.config.vocab_size), dtype=logits_type(self.model), device=self.device)


class StatePass(NamedTuple):
    """Variant of a static pass.

    rows : state rows that it fills first; of_state : whether its draft row is made of a state, too
    first : whether the first token of the text is pending, which has no state before it
    """

    rows: int
    of_state: bool
    first: bool = False


class StaticStateDrafter(StateRows, StaticInsideTarget):
    """A layer over the states of a split target, over static caches."""

    def __init__(self, target: StaticSplitTarget, model: Any):
        self.target = target
        self._state_sizes: dict[int, Size] = {}
        super().__init__(target, model)

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length + MAX_STATE_ROWS)
        super().reserve(length + MAX_STATE_ROWS)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        self.reserve(self.length + len(tokens))
        drafted, first, variant = self._open(tokens)
        if drafted:
            assert len(drafted) <= MAX_STEP_TOKENS, "these are the rows of a draft"
            return self._step(self._chain(len(drafted)), drafted, first, variant)[-keep:]
        assert isinstance(variant, StatePass)
        if variant.rows:
            self.recorded.run(variant, lambda: (self._fill_state_rows(variant),))
        return self.embedding.new_empty(0, self.head.out_features)

    @abstractmethod
    def _state_input(self, rows: Rows) -> torch.Tensor:
        """Make the layer's input [N, d] of state rows."""

    def _prepare_state_rows(self, tokens: Sequence[int], start: int) -> int:
        """Announce the state rows of these tokens, from slot `start` on, to the next pass; return how many it fills."""
        if not tokens:
            return 0
        if len(tokens) > MAX_STATE_ROWS:
            slots = torch.arange(start, start + len(tokens), device=self.device)
            rows = self.stack.rows_at(slots, self.stack.attend_up_to(start, None))
            rows = rows._replace(tokens=torch.tensor([tokens], device=self.device))
            self.stack.fill(self._state_input(rows), rows)
            return 0
        count = next(size for size in STATE_ROWS if size >= len(tokens))
        self._state_size(count).packed.put([*tokens, *[0] * (count - len(tokens)), start])
        return count

    def _state_size(self, count: int) -> Size:
        if count not in self._state_sizes:  # apart from those of draft rows because a pass may have both
            self._state_sizes[count] = Size(1, count, count, self.device)
        return self._state_sizes[count]

    def _fill_state_rows(self, variant: StatePass) -> torch.Tensor:
        """Write the state rows' keys and values into their slots; return the slots [N]."""
        rows = self._state_size(variant.rows).rows()
        # Surplus rows may stand beyond the model's positions.
        rows = rows._replace(positions=rows.positions.clamp(max=self.max_positions - 1))
        self.stack.fill(self._state_input(rows), rows)
        return rows.slots
