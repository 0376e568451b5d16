"""Tree attention: the nodes of a draft tree attend to a long cache and to their own ancestors."""

from __future__ import annotations

import math
from functools import cache

import torch

from speckernels.ops.results import check_tensor
from speckernels.runtime.dispatch import register

MAX_NODES = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TMA_ENVIRONMENT = "SPECKERNELS_TMA"  # "0": never; "1": wherever it can, emulated too (default: on Hopper)
MIN_TILES = 2  # a part below this many tiles of slots costs more to merge than it saves
GOOD_ENOUGH = 0.9  # of the best use of the multiprocessors: fewer parts mean less to merge
FULL_SHARED_BYTES = 163 * 1024  # of a block: the largest tiles; A100, H100 and later data-center GPUs have them
SMALL_SHARED_BYTES = 99 * 1024  # of a block on RTX 30, 40 and 50, A40, L40S


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    tail_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * query keys^T) values, where node i sees the context and its ancestors.

    Node i of sequence b sees the slots below context_lens[b], and slot context_lens[b] + j of the
    tail where bit j of its mask is set. Heads are grouped: query head h reads key head
    h // (Hq / Hkv).

    By default the tail is the n nodes themselves. A tree that grows by levels gives its new nodes
    as the queries and all its nodes as the tail; a tail of length 0 leaves the context alone.

    Parameters
    ----------
    query : [B, Hq, n, D], n up to 256; float16, bfloat16, float32 or float64
    keys, values : [B, Hkv, L, D], a static cache of capacity L that already holds the tail's
        keys and values behind the context. Later slots may hold anything, NaN too.
        Strides are free but for D, which is contiguous in query, keys and values
    mask_bits : int32 [B, n, ceil(n / 32)], whether a node sees each node of the tail, from
        `pack_bits`; with `tail_lens` any number of words, and slots of the tail beyond them are not seen
    context_lens : int32 [B], cached tokens before the tail. context + tail <= L is not checked,
        since lengths stay on the device; slots beyond L are never read
    scale : factor of the scores, > 0, usually 1 / sqrt(D)
    tail_lens : int32 [B], slots of each tail; by default n

    Returns
    -------
    [B, n, Hq, D], contiguous, in the type of query. Sums are at least float32. 0 for a node
        that sees nothing

    Raises
    ------
    ValueError
        For other types, shapes or strides.

    References
    ----------
    Miao et al. 2024, arXiv:2305.09781, section 4.2 (tree attention); Dao et al. 2023,
    Flash-Decoding (splits of the cache).
    """
    if query.dtype not in DTYPES or query.dim() != 4 or not 1 <= query.shape[2] <= MAX_NODES:
        raise ValueError(
            f"query is {query.dtype} {list(query.shape)}; give a float [B, Hq, n, D] with 1 to {MAX_NODES} nodes"
        )
    batch, heads, nodes, dim = query.shape
    least_slots = nodes if tail_lens is None else 1
    for name, part in (("keys", keys), ("values", values)):
        fits = part.dim() == 4 and part.shape[3] == dim and part.shape == keys.shape and part.dtype == query.dtype
        if not fits or part.shape[0] != batch or heads % part.shape[1] or part.shape[2] < least_slots:
            raise ValueError(
                f"{name} is {part.dtype} {list(part.shape)}; give {query.dtype} [{batch}, Hkv, L, {dim}] "
                f"with Hkv a divisor of {heads}, L at least {least_slots}, the same for keys and values"
            )
    for name, tensor in (("query", query), ("keys", keys), ("values", values)):
        if tensor.stride(3) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(3)} along D; make its last dimension contiguous")
    words = (nodes + 31) // 32 if tail_lens is None else None
    for name, numbers, shape in (
        ("mask_bits", mask_bits, (batch, nodes, words)),
        ("context_lens", context_lens, (batch,)),
        ("tail_lens", tail_lens, (batch,)),
    ):
        if numbers is not None:
            check_tensor(name, numbers, (torch.int32,), shape, query.device)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale is {scale}; give a positive number, usually 1 / sqrt(D)")
    if query.numel() == 0:
        return empty_result(query)
    tails = None if tail_lens is None else tail_lens.contiguous()
    result: torch.Tensor = torch.ops.speckernels.tree_attention(
        query, keys, values, mask_bits.contiguous(), context_lens.contiguous(), float(scale), tails
    )
    return result


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Pack booleans into words of 32 bits, as `tree_attention` takes its mask.

    Parameters
    ----------
    mask : bool [..., n]

    Returns
    -------
    int32 [..., ceil(n / 32)], bit i % 32 of word i // 32 is element i; missing elements are 0
    """
    words = (mask.shape[-1] + 31) // 32
    padded = torch.nn.functional.pad(mask, (0, 32 * words - mask.shape[-1])).unflatten(-1, (words, 32)).long()
    whole = (padded << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def empty_result(query: torch.Tensor) -> torch.Tensor:
    """Uninitialised result of the right shape and type."""
    batch, heads, nodes, dim = query.shape
    return query.new_empty(batch, nodes, heads, dim)


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    strides = (stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1)
    return tensor.data_ptr() % 16 == 0 and all(stride % (16 // tensor.itemsize) == 0 for stride in strides)


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory, in bytes, that a thread block may use."""
    if device.type != "cuda":
        return FULL_SHARED_BYTES
    # Missing from torch's type stubs.
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return limit


@cache
def split_count(blocks: int, capacity_tiles: int, slots: int) -> int:
    """Number of parts per sequence and head.

    blocks : thread blocks if the cache is not cut; capacity_tiles : tiles in a full cache;
    slots : blocks the GPU runs at once. The last wave of blocks leaves part of the GPU idle:
    the fewest parts that come within GOOD_ENOUGH of the best use are taken.
    """
    max_splits = max(1, min(slots, capacity_tiles // MIN_TILES))
    waves = {splits: -(-blocks * splits // slots) for splits in range(1, max_splits + 1)}
    used = {splits: blocks * splits / (count * slots) for splits, count in waves.items()}
    best = max(used.values())
    return next(splits for splits, share in used.items() if share >= GOOD_ENOUGH * best)


register(
    "tree_attention",
    "(Tensor query, Tensor keys, Tensor values, Tensor mask_bits, Tensor context_lens, float scale, "
    "Tensor? tail_lens=None) -> Tensor",
    lambda query, *others: empty_result(query),
)
