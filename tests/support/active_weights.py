"""Weights that a token is multiplied with, counted block by block."""

from __future__ import annotations

from specsim.cost.roofline.shape import Architecture, Experts


def active_weights(model: Architecture) -> int:
    """All weights but tables that are looked up, and experts that a token does not go to; norms are in."""
    tables = model.tables + (0 if model.tied else model.vocab_size * model.hidden_size)
    idle = sum(
        n * (block.count - block.per_token) * block.weights(model.hidden_size) // block.count
        for block, n in model.blocks.items()
        if isinstance(block, Experts)
    )
    return model.parameters - tables - idle
