"""Tree attention: the nodes of a draft tree attend to a long cache and to their own ancestors."""

from __future__ import annotations

import math

import torch

from speckernels.runtime.dispatch import register

MAX_NODES = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_bits: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * query keys^T) values, where node i sees the context and its ancestors.

    Node i of sequence b sees the slots below context_lens[b], and slot context_lens[b] + j
    where bit j of its mask is set (itself always is). Heads are grouped: query head h reads
    key head h // (Hq / Hkv).

    Parameters
    ----------
    query : [B, Hq, n, D], n up to 256; float16, bfloat16, float32 or float64
    keys, values : [B, Hkv, L, D], a static cache of capacity L that already holds the n
        nodes' keys and values behind the context. Later slots may hold anything, NaN too.
        Strides are free but for D, which is contiguous in query, keys and values
    mask_bits : int32 [B, n, ceil(n / 32)], as tree_metadata gives it
    context_lens : int32 [B], cached tokens before the root. context + n <= L is not checked,
        since lengths stay on the device; slots beyond L are never read
    scale : factor of the scores, > 0, usually 1 / sqrt(D)

    Returns
    -------
    [B, n, Hq, D], contiguous, in the type of query. Sums are at least float32.

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
    for name, cache in (("keys", keys), ("values", values)):
        fits = cache.dim() == 4 and (cache.shape[0], cache.shape[3]) == (batch, dim) and cache.shape == keys.shape
        if cache.dtype != query.dtype or not fits or heads % cache.shape[1] or cache.shape[2] < nodes:
            raise ValueError(
                f"{name} is {cache.dtype} {list(cache.shape)}; give {query.dtype} [{batch}, Hkv, L, {dim}] "
                f"with Hkv a divisor of {heads}, L at least {nodes}, the same for keys and values"
            )
    for name, tensor in (("query", query), ("keys", keys), ("values", values)):
        if tensor.stride(3) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(3)} along D; make its last dimension contiguous")
    words = (nodes + 31) // 32
    if mask_bits.dtype != torch.int32 or mask_bits.shape != (batch, nodes, words):
        raise ValueError(
            f"mask_bits is {mask_bits.dtype} {list(mask_bits.shape)}; give int32 [{batch}, {nodes}, {words}]"
        )
    if context_lens.dtype != torch.int32 or context_lens.shape != (batch,):
        raise ValueError(f"context_lens is {context_lens.dtype} {list(context_lens.shape)}; give int32 [{batch}]")
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale is {scale}; give a positive number, usually 1 / sqrt(D)")
    if query.numel() == 0:
        return empty_result(query)
    result: torch.Tensor = torch.ops.speckernels.tree_attention(
        query, keys, values, mask_bits.contiguous(), context_lens.contiguous(), float(scale)
    )
    return result


def empty_result(query: torch.Tensor) -> torch.Tensor:
    """Uninitialised result of the right shape and type."""
    batch, heads, nodes, dim = query.shape
    return query.new_empty(batch, nodes, heads, dim)


register(
    "tree_attention",
    "(Tensor query, Tensor keys, Tensor values, Tensor mask_bits, Tensor context_lens, float scale) -> Tensor",
    lambda query, keys, values, mask_bits, context_lens, scale: empty_result(query),
)
