"""Tree attention in torch: the result that the other backends must match up to rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    tail_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    nodes = query.shape[2]
    kv_heads, capacity = keys.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    tails = torch.full_like(context_lens, nodes) if tail_lens is None else tail_lens
    # The place in the tail that a slot is, [B, L]; negative in the context.
    place = torch.arange(capacity, device=query.device) - context_lens[:, None]
    used = place < tails[:, None]
    bits = F.pad(mask_bits, (0, 1))  # a word of zeros, for places beyond the mask
    within = place.clamp(0, 32 * mask_bits.shape[2])
    words = bits.gather(2, (within // 32)[:, None].expand(-1, nodes, -1))
    is_set = (words >> (within % 32)[:, None] & 1).bool()
    sees = used[:, None] & ((place < 0)[:, None] | is_set)  # [B, n, L]

    # Slots behind the tail become 0 in values too: 0 * NaN is NaN.
    k, v = (torch.where(used[:, None, :, None], cache, 0).to(wide)[:, :, None] for cache in (keys, values))
    q = query.to(wide).unflatten(1, (kv_heads, -1))  # [B, Hkv, G, n, D]
    scores = (q @ k.mT * scale).masked_fill(~sees[:, None, None], -torch.inf)
    weights = scores.softmax(-1).masked_fill(~sees.any(-1)[:, None, None, :, None], 0)
    result: torch.Tensor = (weights @ v).flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()
    return result
