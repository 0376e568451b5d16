"""Tree attention in torch: what the other backends must equal up to rounding."""

from __future__ import annotations

import torch


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    nodes = query.shape[2]
    kv_heads, capacity = keys.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    # The node whose key a slot holds, [B, L]; negative in the context.
    node = torch.arange(capacity, device=query.device) - context_lens[:, None]
    used = (node < nodes)[:, None, :, None]
    within = node.clamp(0, nodes - 1)
    words = mask_bits.gather(2, (within // 32)[:, None].expand(-1, nodes, -1))
    is_set = (words >> (within % 32)[:, None] & 1).bool()
    sees = (node < 0)[:, None] | (is_set & (node < nodes)[:, None])  # [B, n, L]

    # Slots behind the tree become 0 in values too: 0 * NaN is NaN.
    k, v = (torch.where(used, cache, 0).to(wide)[:, :, None] for cache in (keys, values))
    q = query.to(wide).unflatten(1, (kv_heads, -1))  # [B, Hkv, G, n, D]
    scores = (q @ k.mT * scale).masked_fill(~sees[:, None, None], -torch.inf)
    attended = scores.softmax(-1) @ v
    result: torch.Tensor = attended.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()
    return result
