"""Merging attention in CUDA C++: csrc/tree_attention.cu."""

from __future__ import annotations

import torch

from speckernels.ops.tree_attention import DTYPES
from speckernels.runtime.launch import call


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    sizes = (DTYPES.index(out_a.dtype), lse_a.numel(), out_a.shape[3])
    call("tree_attention", "merge_attention", out_a, lse_a, out_b, lse_b, out, lse, *sizes)
    return out, lse
