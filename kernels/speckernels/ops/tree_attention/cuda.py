"""Tree attention in CUDA C++: csrc/tree_attention.cu, and for many rows on Hopper csrc/tree_attention_hopper.cu."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from speckernels.ops.tree_attention import (
    DTYPES,
    FULL_SHARED_BYTES,
    SMALL_SHARED_BYTES,
    TMA_ENVIRONMENT,
    empty_result,
    is_aligned,
    shared_bytes,
    split_count,
)
from speckernels.runtime.errors import Unsupported
from speckernels.runtime.launch import block_slots, call, counters

BLOCK_DIMS = (32, 64, 96, 128, 192, 256)  # shapes of the kernel; smaller heads are filled up with zeros
MAX_DIM = BLOCK_DIMS[-1]
BLOCK_ROWS = (16, 64, 128)
BLOCK_KEYS = 64
# The same of csrc/tree_attention_hopper.cu.
HOPPER_DIMS, HOPPER_ROWS, HOPPER_KEYS = (64, 128), (64, 128), 128


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    tail_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, heads, nodes, dim = query.shape
    if dim > MAX_DIM:
        raise Unsupported(f"the cuda backend takes heads of up to {MAX_DIM}, not {dim}")
    kv_heads, capacity = keys.shape[1:3]
    out = empty_result(query)
    group = heads // kv_heads
    kind = DTYPES.index(query.dtype)
    sizes = _sizes(
        *(nodes, mask_bits.shape[2], group, dim, capacity),
        *(stride for tensor in (query, keys, values) for stride in tensor.stride()[:3]),
    )
    tensors = (query, keys, values, mask_bits, context_lens, tail_lens, out)
    if not (query.dtype.itemsize == 2 and dim % 8 == 0 and all(map(is_aligned, (query, keys, values)))):
        call("tree_attention", "tree_attention_simple", *tensors, sizes, kind, batch, kv_heads, scale)
        return out

    tight = shared_bytes(query.device) < FULL_SHARED_BYTES
    if shared_bytes(query.device) < (FULL_SHARED_BYTES if dim > 128 else SMALL_SHARED_BYTES):
        raise Unsupported(
            f"the cuda backend needs a GPU with {SMALL_SHARED_BYTES // 1024} KiB of shared memory per block, "
            f"{FULL_SHARED_BYTES // 1024} KiB for D above 128"
        )
    rows = nodes * group
    variant: tuple[int, ...] = ()
    if _takes_hopper(rows, keys, values):
        source, block_keys = "tree_attention_hopper", HOPPER_KEYS
        block_dim = next(size for size in HOPPER_DIMS if dim <= size)
        block_rows = next((size for size in HOPPER_ROWS if rows <= size), HOPPER_ROWS[-1])
        slots = block_slots(query.device, source, "tree_attention_hopper_occupancy", block_dim, block_rows)
    else:
        source, block_keys, variant = "tree_attention", BLOCK_KEYS, (int(tight),)
        block_dim = next(size for size in BLOCK_DIMS if dim <= size)
        block_rows = 64 if dim > 128 else next((size for size in BLOCK_ROWS if rows <= size), BLOCK_ROWS[-1])
        if tight and dim > 64:
            block_rows = min(block_rows, 64)
        slots = block_slots(query.device, source, "tree_attention_occupancy", block_dim, block_rows, *variant)
    tiles = -(-rows // block_rows) * kv_heads * batch
    splits = split_count(tiles, -(-capacity // block_keys), slots)
    workspace: tuple[torch.Tensor | None, ...] = (None, None, None)
    if splits > 1:
        workspace = (
            query.new_empty(tiles, splits, block_rows, block_dim, dtype=torch.float32),
            query.new_empty(tiles, splits, block_rows, 2, dtype=torch.float32),
            counters(query, tiles * splits),
        )
    shape = (kind, batch, kv_heads, splits, block_dim, block_rows, *variant)
    call(source, source, *tensors, *workspace, sizes, *shape, scale)
    return out


def _takes_hopper(rows: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether csrc/tree_attention_hopper.cu has tiles for these shapes, on Hopper, or on the host if asked for."""
    on_gpu = keys.device.type == "cuda"
    able = not on_gpu or torch.cuda.get_device_capability(keys.device)[0] == 9
    wanted = os.environ.get(TMA_ENVIRONMENT, "1" if on_gpu else "0") == "1"
    if not (able and wanted and keys.element_size() == 2 and is_aligned(keys) and is_aligned(values)):
        return False
    expanded = 0 in (*keys.stride(), *values.stride())  # nothing promises that a tensor map takes it
    fits = rows >= HOPPER_ROWS[0] and keys.shape[3] <= HOPPER_DIMS[-1]
    return fits and not expanded


@lru_cache(maxsize=4096)
def _sizes(*numbers: int) -> torch.Tensor:
    """Numbers in host memory, cached by shapes and strides."""
    return torch.tensor(numbers, device="cpu")
