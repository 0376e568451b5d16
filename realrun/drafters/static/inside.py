"""A drafter's pass inside a target's, over its static cache or states."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from realrun.lm.fused_ops import PLAIN
from realrun.lm.static.llama import StaticLlama


class InsideTarget(StaticLlama):
    """A pass that reads what lies at the target's addresses: recorded as the target's are, and anew when those move."""

    def __init__(self, target: StaticLlama, model: Any):
        self.target: Any = target
        super().__init__(model, graphs=False, compiled=target._pieces is not PLAIN)
        self.recorded.graphs = target.recorded.graphs
        target.stack.readers.append(self.recorded)

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        super().warm(sizes, length, tree_nodes)
        self.target.warm_again()


def with_layers(model: Any, layers: Sequence[Any]) -> Any:
    """The model with these layers in place of its own, which shares the rest with it."""
    whole, inner = copy.copy(model), copy.copy(model.model)
    whole._modules, inner._modules = dict(model._modules), dict(model.model._modules)
    inner.layers = torch.nn.ModuleList(layers)
    whole.model = inner
    return whole
