"""EESD's pass over a split target's static cache (`realrun.drafters.eesd.EarlyExitLM`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from realrun.drafters.static.inside import InsideTarget, with_layers
from realrun.lm.static.sizes import Rows
from realrun.lm.static.split import StaticSplitTarget


class StaticEarlyExit(InsideTarget):
    """The exit layers over the states of the target's lower layers, which run in the same pass where they have not yet.

    A pass's variant is how many of its rows, the first ones, the target holds the states of.
    """

    def __init__(self, target: StaticSplitTarget, model: Any, shared: int):
        self.target = target
        target.runs_ahead = True
        super().__init__(target, with_layers(model, model.model.layers[shared:]))

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        self.target.reserve(length)
        super().reserve(length)

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        if tree_nodes:
            self.reserve(length)
            self.target.warm_lower(tree_nodes)
        super().warm(sizes, length, tree_nodes)

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        target = self.target
        known = min(target.length + len(target.ahead) - self.length, len(tokens))
        target.ahead += tokens[known:]
        return tokens, self.length, known

    def _variants(self, n: int) -> Sequence[Hashable]:
        return (0, n - 1) if n > 1 else (0,)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        assert len(self.target.ahead) == 1
        logits = super()._forward_nodes(tokens, depths, visible)
        self.target.nodes_ahead += len(tokens)
        return logits

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        assert isinstance(variant, int)
        if variant == 0:
            return self.target.run_lower(rows)
        if variant < len(rows.slots):
            self.target.run_lower(rows.tail(len(rows.slots) - variant))
        return self.target.states[rows.slots]

    def _prompt(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, end, target = self.length, self.length + len(tokens), self.target
        known = target.length + len(target.ahead) - start
        if known < len(tokens):
            target.prompt_ahead(tokens[known:])
        _, hidden = self.stack.prompt(target.states[start:end], start, self.norm_out)
        self.hidden = hidden[-keep:].clone() if keep else hidden
        return self.logits_of(self.hidden)
