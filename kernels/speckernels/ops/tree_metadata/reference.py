"""Tree metadata in torch: the result that the other backends must match."""

from __future__ import annotations

import torch


def tree_metadata(
    parents: torch.Tensor, context_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, nodes = parents.shape
    index = torch.arange(nodes, device=parents.device)
    used = (parents >= 0) | (index == 0)
    # A node sees itself and what its parent sees; parents come first.
    sees = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    for node in range(1, nodes):
        parent = parents[:, node]
        above = sees[torch.arange(batch, device=parents.device), parent.clamp(min=0).long()]
        sees[:, node] |= above & (parent >= 0)[:, None]
    depth = sees.sum(-1) - 1

    is_child = (parents[:, None, :] == index[None, :, None]) & used[:, :, None]  # [B, node, its child]
    first_child = torch.where(is_child, index, nodes).amin(-1)
    same_parent = (parents[:, :, None] == parents[:, None, :]) & (parents >= 0)[:, :, None]
    later = index[None, :] > index[:, None]
    next_sibling = torch.where(same_parent & later, index, nodes).amin(-1)
    none = torch.full_like(first_child, -1)
    return (
        pack_bits(sees),
        context_lens[:, None].long() + depth,
        torch.where(first_child < nodes, first_child, none).int(),
        torch.where(next_sibling < nodes, next_sibling, none).int(),
    )


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack booleans [..., n] into int32 words [..., ceil(n / 32)], lowest bit first."""
    words = (mask.shape[-1] + 31) // 32
    padded = torch.nn.functional.pad(mask, (0, 32 * words - mask.shape[-1])).unflatten(-1, (words, 32)).long()
    whole = (padded << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()
