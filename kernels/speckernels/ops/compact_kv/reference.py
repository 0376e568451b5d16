"""KV compaction in torch: the result that the other backends must match."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # copies of floats may change the bits of a NaN


def compact_kv(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    path: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    steps, slots = path.shape[1], keys[0].shape[2]
    if steps == 0 or slots == 0 or not len(path):
        return
    slot = torch.arange(slots, device=path.device)
    on_path = (path >= 0).cumprod(1).bool()
    step = slot - context_lens[:, None]  # [B, S]
    at = step.clamp(0, steps - 1)
    source = context_lens[:, None] + path.gather(1, at)
    moves = (step >= 0) & (step < steps) & on_path.gather(1, at) & (source < slots)
    source = torch.where(moves, source, slot)
    for tensor in (*keys, *values):
        words = tensor.view(INTEGERS[tensor.element_size()])
        words.copy_(words.gather(2, source[:, None, :, None].expand_as(words)))
