"""Drafters of one layer that read the target's states: what EDD and EAGLE share.

Behind rows that the target's states of all verified tokens make there are, during a round, rows of the
drafter's own. A round ends with these dropped; the next one starts by making rows of the states that
verification has left in the target (`realrun.lm.split_target`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from realrun.lm.cached import CachedLM
from realrun.lm.head import logits_type
from realrun.lm.layer_stack import LayerStack, ModelParts
from realrun.lm.split_target import SplitTarget


class StateDrafterLM(CachedLM):
    """One layer behind a split target. `length` counts the given rows and, during a round, the own ones behind them.

    given : rows made of the target's states
    """

    reads_target_states = True

    def __init__(self, target: SplitTarget, model: Any, pieces: ModelParts, layers: Sequence[Any]):
        self.target, self.pieces = target, pieces
        self.stack: LayerStack = pieces.stack(layers)
        super().__init__(model)

    def reset(self) -> None:
        self.length = self.nodes = self.given = 0
        self.hidden = None

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Feed tokens; logits [m, V] after the last m of them, at least after the last that is not yet verified."""
        return super().forward(tokens)

    def truncate(self, length: int) -> None:
        """Keep given rows alone, `length` at most."""
        self.given = min(self.given, length)
        self.length, self.nodes = self.given, 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        """The target will give rows for them."""
        self.truncate(self.given)

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        """As `CachedLM.append_rows`; rows that see no other node are the pending tokens of rounds."""
        logits = self._own_rows(tokens, positions, seen, roots=True)
        self.nodes += len(tokens)
        if keep and self.hidden is not None:
            self.hidden = self.hidden[-keep:]
        return logits[-keep:] if keep else logits

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        cached = torch.ones(len(tokens), self.length, dtype=torch.bool)
        positions = [self.length + depth for depth in depths]
        return self._own_rows(tokens, positions, torch.cat([cached, visible], dim=1), roots=False)

    @abstractmethod
    def _own_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, roots: bool
    ) -> torch.Tensor:
        """Logits [n, V] after n new nodes, whose keys and values enter slots behind all others.

        seen : bool [n, length + nodes + n]; roots : whether nodes that see no other stand for pending
            tokens, not for the children of the last cached one
        """

    def _check_trees(self) -> None:
        """All models that come in pieces can do it."""

    def _nothing(self) -> torch.Tensor:
        """Logits of no row."""
        return torch.empty(0, int(self.model.config.vocab_size), dtype=logits_type(self.model), device=self.device)
