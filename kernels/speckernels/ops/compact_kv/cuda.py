"""KV compaction in CUDA C++: csrc/compact_kv.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speckernels.ops.compact_kv import word_bytes
from speckernels.runtime.launch import call


def compact_kv(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    path: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    tensors = (*keys, *values)
    like = tensors[0]
    addresses = [tensor.data_ptr() for tensor in tensors]
    word = word_bytes(like, addresses, 16)
    heads, slots, size = like.shape[1:]
    strides = [stride * like.element_size() // word for stride in like.stride()[:3]]
    # Stays on the host: the addresses travel to the GPU as an argument of the kernel.
    table = torch.tensor(addresses, device="cpu")
    shape = (len(path), heads, slots, size * like.element_size() // word)
    call(
        "compact_kv", "compact_kv",
        path, context_lens, path.shape[1], table, len(tensors), word, *shape, *strides,
    )  # fmt: skip
