"""Tree attention in CUDA C++: csrc/tree_attention.cu."""

from __future__ import annotations

import torch

from speckernels.ops.tree_attention import DTYPES, empty_result
from speckernels.ops.tree_attention.splits import (
    FULL_SHARED_BYTES,
    SMALL_SHARED_BYTES,
    multiprocessors,
    shared_bytes,
    split_count,
)
from speckernels.runtime.counters import counters
from speckernels.runtime.errors import Unsupported
from speckernels.runtime.launch import call

TENSOR_CORE_DIMS = (32, 64, 128, 256)
MAX_DIM = 256
BLOCK_ROWS = (16, 64, 128)
BLOCK_KEYS = 64


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    batch, heads, nodes, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    is_half = query.dtype.itemsize == 2
    if dim > MAX_DIM or (is_half and dim not in TENSOR_CORE_DIMS):
        raise Unsupported(
            f"the cuda backend takes no {query.dtype} with D = {dim}; "
            f"16 bits: D in {TENSOR_CORE_DIMS}, 32 and 64 bits: up to {MAX_DIM}"
        )
    out = empty_result(query)
    group = heads // kv_heads
    kind = DTYPES.index(query.dtype)
    sizes = (batch, kv_heads, group, nodes, dim, capacity, mask_bits.shape[2])
    strides = [stride for tensor in (query, keys, values) for stride in tensor.stride()[:3]]
    tensors = (query, keys, values, mask_bits, context_lens, out)
    if not (is_half and all(map(_is_aligned, (query, keys, values)))):
        call("tree_attention", "tree_attention_simple", *tensors, kind, *sizes, *strides, scale)
        return out

    tight = shared_bytes(query.device) < FULL_SHARED_BYTES
    if shared_bytes(query.device) < (FULL_SHARED_BYTES if dim > 128 else SMALL_SHARED_BYTES):
        raise Unsupported(
            f"the cuda backend needs a GPU with {SMALL_SHARED_BYTES // 1024} KiB of shared memory per block, "
            f"{FULL_SHARED_BYTES // 1024} KiB for D above 128"
        )
    rows = nodes * group
    block_rows = 64 if dim > 128 else next((size for size in BLOCK_ROWS if rows <= size), BLOCK_ROWS[-1])
    if tight and dim == 128:
        block_rows = min(block_rows, 64)
    tiles = -(-rows // block_rows) * kv_heads * batch
    splits = split_count(tiles, -(-capacity // BLOCK_KEYS), multiprocessors(query.device))
    workspace: tuple[torch.Tensor | None, ...] = (None, None, None)
    if splits > 1:
        workspace = (
            query.new_empty(tiles, splits, block_rows, dim, dtype=torch.float32),
            query.new_empty(tiles, splits, block_rows, 2, dtype=torch.float32),
            counters(query, tiles * splits),
        )
    shape = (kind, *sizes, splits, block_rows, int(tight))
    call("tree_attention", "tree_attention", *tensors, *workspace, *shape, *strides, scale)
    return out


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Rows can be read 16 bytes at a time."""
    strides = (stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1)
    return tensor.data_ptr() % 16 == 0 and all(stride % (16 // tensor.itemsize) == 0 for stride in strides)
