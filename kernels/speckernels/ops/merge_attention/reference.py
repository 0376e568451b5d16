"""Merging attention in torch: the result that the other backends must match up to rounding."""

from __future__ import annotations

import torch


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -torch.inf, 0, lse)  # neither part was seen
    share_a, share_b = ((lse - shift).exp()[..., None] for lse in (lse_a, lse_b))
    return (share_a * out_a + share_b * out_b).to(out_a.dtype), lse
