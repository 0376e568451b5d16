"""Weights that a token is multiplied with, and the FLOPs of these products."""

from __future__ import annotations

from specsim.cost.roofline.passes import Roofline
from specsim.cost.roofline.shape import Architecture, Experts


def active_weights(model: Architecture) -> int:
    """All weights but lookup tables and the experts that a token is not routed to; norms count."""
    tables = model.tables + (0 if model.tied else model.vocab_size * model.hidden_size)
    idle = sum(
        n * (block.count - block.per_token) * block.weights(model.hidden_size) // block.count
        for block, n in model.blocks.items()
        if isinstance(block, Experts)
    )
    return model.parameters - tables - idle


def flops_of_weights(passes: Roofline) -> float:
    """FLOPs of a decode step at context 0, without attention to the cache and to recurrent states."""
    attention = ("attention", "index scores", "linear attention")
    operations = passes.operations(1, 0)
    return sum(float(operation.flops) for operation in operations if operation.name not in attention)
