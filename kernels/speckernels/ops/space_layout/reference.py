"""SPACE's layout in torch: the result that the other backends must match."""

from __future__ import annotations

import torch


def space_layout(like: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    node = torch.arange(1 + candidates * (candidates + 2), dtype=torch.int32, device=like.device)
    is_mask = node > candidates
    place = node - 1 - candidates  # among the mask tokens
    group = torch.where(is_mask, place // max(candidates, 1), -1)
    opens_group = is_mask & (place % max(candidates, 1) == 0)
    return torch.where(opens_group, group, node - 1), is_mask, group
