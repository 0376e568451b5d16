"""KV compaction: move the accepted tokens' entries to the end of the kept context, in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch

from speckernels.ops.results import check_tensor, describe
from speckernels.runtime.dispatch import register

MAX_TENSORS = 512
CACHE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compact_kv(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    path: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """Move slot context + path[j] to slot context + j, for each j up to the first negative path[j].

    All layers in one launch. Entries that already lie where they belong are neither read nor
    written; an entry that would come from outside the cache is not moved.

    Parameters
    ----------
    keys, values : one tensor per layer, float16, bfloat16, float32 or float64 [B, H, S, D], all
        alike in type, shape and strides; D contiguous, other strides arbitrary. At most 512
        tensors together. Changed in place
    path : int32 [B, m], ascending with path[j] >= j, padded with -1: the path of a verification
    context_lens : int32 [B], cached tokens before slot path[j] = 0

    Raises
    ------
    ValueError
        For other types, shapes or strides.
    """
    tensors = [*keys, *values]
    if not keys or len(keys) != len(values) or len(tensors) > MAX_TENSORS:
        raise ValueError(
            f"{len(keys)} keys and {len(values)} values; give one of each per layer, 1 to {MAX_TENSORS} together"
        )
    like = tensors[0]
    if like.dtype not in CACHE_TYPES or like.dim() != 4 or (like.shape[3] > 1 and like.stride(3) != 1):
        raise ValueError(
            f"keys[0] is {describe(like)} with strides {list(like.stride())}; give float16, bfloat16, float32 or "
            "float64 [B, H, S, D] with contiguous D"
        )
    dtype, shape, strides, device = like.dtype, like.shape, like.stride(), like.device
    for number, tensor in enumerate(tensors):
        if tensor.dtype != dtype or tensor.shape != shape or tensor.stride() != strides:
            name = f"keys[{number}]" if number < len(keys) else f"values[{number - len(keys)}]"
            raise ValueError(
                f"{name} is {describe(tensor)} with strides {list(tensor.stride())}; give all layers as keys[0]: "
                f"{describe(like)} with strides {list(strides)}"
            )
        if tensor.device != device:
            raise ValueError(f"layer tensors are on {device} and {tensor.device}; give one device")
    check_tensor("path", path, (torch.int32,), (like.shape[0], None), like.device)
    check_tensor("context_lens", context_lens, (torch.int32,), (like.shape[0],), like.device)
    torch.ops.speckernels.compact_kv(list(keys), list(values), path.contiguous(), context_lens.contiguous())


def word_bytes(like: torch.Tensor, addresses: Sequence[int], largest: int) -> int:
    """The largest power of 2, up to `largest`, that divides every row's address and length."""
    size = like.element_size()
    together = largest | like.shape[3] * size
    for stride, length in zip(like.stride()[:3], like.shape[:3], strict=True):
        together |= stride * size if length > 1 else 0
    together = reduce(or_, addresses, together)
    return together & -together


register(
    "compact_kv",
    "(Tensor(a!)[] keys, Tensor(b!)[] values, Tensor path, Tensor context_lens) -> ()",
    lambda *arguments: None,
)
