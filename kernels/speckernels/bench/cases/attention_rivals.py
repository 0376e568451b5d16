"""Tree attention of other libraries.

Each gets what it needs prepared outside the clock: boolean masks, block masks, plans, page tables. They see the cache
cut to its used length.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from speckernels.bench.cases.base import Arguments, Case, Rival, random_tree

FLASHINFER_WORKSPACE_BYTES = 256 << 20
PAGE_SLOTS = 64  # of FlashInfer's XQA; the cache's capacity is a multiple
SEMAPHORES = 1 << 21


def tree_of(case: Case) -> torch.Tensor:
    """parents [1, n]: one tree per size, the same for the whole batch."""
    return random_tree(case.shape["nodes"], 1, torch.Generator().manual_seed(case.shape["nodes"]))


def sees_of(case: Case) -> torch.Tensor:
    """Whether row i sees tree node j, bool [n, n]."""
    parents = tree_of(case)[0].tolist()
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        sees[node] |= sees[parent]
    return sees


def whole_mask(case: Case, device: torch.device) -> torch.Tensor:
    """Whether row i sees key j, bool [n, context + n]."""
    prefix = torch.ones(case.shape["nodes"], case.shape["context"], dtype=torch.bool)
    return torch.cat((prefix, sees_of(case)), 1).to(device)


def _sdpa(expand: bool) -> Callable[[Case, Arguments], Callable[..., torch.Tensor]]:
    """SDPA with a boolean mask; K and V either shared by `enable_gqa` or expanded within the measured time."""

    def prepare(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
        groups = case.shape["q_heads"] // case.shape["kv_heads"]
        used, mask = case.shape["context"] + case.shape["nodes"], whole_mask(case, args[0].device)

        def run(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, context: Any, scale: float
        ) -> torch.Tensor:
            keys, values = keys[:, :, :used], values[:, :, :used]
            if expand:
                keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            shared = groups > 1 and not expand
            out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=shared)
            return out.transpose(1, 2)

        return run

    return prepare


def _sdpa_cudnn(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """`_sdpa_packed` by cuDNN, or an error."""
    packed = _sdpa_packed(case, args)

    def run(*args: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return packed(*args)

    return run


def _sdpa_packed(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """SDPA with the query heads of a KV head as rows of one matrix, so that keys and values are read once for them."""
    groups = case.shape["q_heads"] // case.shape["kv_heads"]
    used, mask = case.shape["context"] + case.shape["nodes"], whole_mask(case, args[0].device).repeat(groups, 1)

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, context: Any, scale: float
    ) -> torch.Tensor:
        batch, _, nodes, dim = query.shape
        rows = query.reshape(batch, keys.shape[1], groups * nodes, dim)
        out = scaled_dot_product_attention(rows, keys[:, :, :used], values[:, :, :used], attn_mask=mask, scale=scale)
        return out.reshape(query.shape).transpose(1, 2)

    return run


def _prefix_and_merge(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """Cascade attention as in SGLang: flash attention over the context without a mask, the tree separately, merged.

    The query heads of a KV head are rows of one matrix; K and V are read once for them.
    """
    sizes = case.shape
    groups, context = sizes["q_heads"] // sizes["kv_heads"], sizes["context"]
    used = context + sizes["nodes"]
    mask = sees_of(case).to(args[0].device).repeat(groups, 1)  # [G n, n]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, lens: Any, scale: float
    ) -> torch.Tensor:
        rows = query.reshape(len(query), keys.shape[1], -1, query.shape[3])  # [B, Hkv, G n, D]
        prefix = rows, keys[:, :, :context], values[:, :, :context]
        out, lse = (flash if query.is_cuda else of_cpu)(*prefix, 0.0, False, scale=scale)[:2]
        scores = (rows @ keys[:, :, context:used].mT).to(lse.dtype) * scale
        scores = scores.masked_fill(~mask, -torch.inf)
        tail = scores.softmax(-1).to(query.dtype) @ values[:, :, context:used]
        share = (lse - scores.logsumexp(-1)).sigmoid()[..., None]
        merged = torch.lerp(tail, out, share.to(out.dtype))
        return merged.view(query.shape).transpose(1, 2)

    return run


def _flex(tuned: bool) -> Callable[[Case, Arguments], Callable[..., torch.Tensor]]:
    """FlexAttention with its default tiles or with those that autotuning finds."""
    return lambda case, args: _flex_of(case, args, "max-autotune-no-cudagraphs" if tuned else None)


def _flex_of(case: Case, args: Arguments, mode: str | None) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled, with a block mask of the tree."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    context, nodes = case.shape["context"], case.shape["nodes"]
    sees = sees_of(case).to(args[0].device)

    def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (key < context) | sees[row, (key - context).clamp(min=0)]

    mask = create_block_mask(visible, None, None, nodes, context + nodes, device=args[0].device.type)
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    shared = case.shape["q_heads"] != case.shape["kv_heads"]

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, lens: Any, scale: float
    ) -> torch.Tensor:
        used = context + nodes
        keys, values = keys[:, :, :used], values[:, :, :used]
        out: torch.Tensor = compiled(query, keys, values, block_mask=mask, scale=scale, enable_gqa=shared)
        return out.transpose(1, 2)

    return run


def _flashinfer(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """FlashInfer's batch prefill with a custom mask; each row's cache is one page, so nothing is copied."""
    flashinfer: Any = importlib.import_module("flashinfer")
    sizes, device = case.shape, args[0].device
    batch, nodes, used = sizes["batch"], sizes["nodes"], sizes["context"] + sizes["nodes"]
    capacity = args[1].shape[2]

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
    wrapper.plan(
        numbers(*range(0, (batch + 1) * nodes, nodes)),  # rows of the query
        numbers(*range(batch + 1)),  # pages of each request
        numbers(*range(batch)),
        numbers(*[used] * batch),  # slots used in the last page
        sizes["q_heads"],
        sizes["kv_heads"],
        sizes["head"],
        capacity,
        custom_mask=whole_mask(case, device).flatten().repeat(batch),
        sm_scale=args[5],
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, lens: Any, scale: float
    ) -> torch.Tensor:
        rows = query.transpose(1, 2).reshape(batch * nodes, sizes["q_heads"], sizes["head"])
        out: torch.Tensor = wrapper.run(rows, (keys, values))
        return out.view(batch, nodes, sizes["q_heads"], sizes["head"])

    return run


def _xqa(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """FlashInfer's XQA, TensorRT-LLM's kernel for trees: it takes the mask's bits as they are, and a paged cache."""
    xqa: Any = importlib.import_module("flashinfer.xqa").xqa
    sizes, device = case.shape, args[0].device
    batch, nodes, heads, dim = (sizes[name] for name in ("batch", "nodes", "kv_heads", "head"))
    capacity = args[1].shape[2]
    pages = capacity // PAGE_SLOTS
    # The cache as pages of all heads, without a copy: page p of a sequence begins where its slots do in head 0.
    shape = (((batch - 1) * heads + 1) * pages, heads, PAGE_SLOTS, dim)
    strides = (PAGE_SLOTS * dim, capacity * dim, dim, 1)
    first = torch.arange(batch, device=device)[:, None] * heads * pages
    table = (first + torch.arange(pages, device=device)).int()
    used = torch.full((batch, 1), sizes["context"] + nodes, dtype=torch.int32, device=device).view(torch.uint32)
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32, device=device).view(torch.uint32)

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, lens: Any, scale: float
    ) -> torch.Tensor:
        rows = query.transpose(1, 2)  # [B, n, Hq, D]
        rows = rows[:, None] if nodes > 1 else rows  # one beam; for one node [B, 1, Hq, D]
        out = torch.empty_like(rows)
        paged = (cache.as_strided(shape, strides) for cache in (keys, values))
        xqa(
            rows, *paged, table, used, out, workspace, semaphores, heads, PAGE_SLOTS, kv_layout="HND",
            q_scale=scale * dim**0.5, q_seq_len=nodes, mask=bits.view(torch.uint16) if nodes > 1 else None,
        )  # fmt: skip
        return out.view(batch, nodes, -1, dim)

    return run


def _is_grouped(case: Case) -> bool:
    return case.shape["q_heads"] > case.shape["kv_heads"]


def _has_flashinfer(case: Case) -> bool:
    return find_spec("flashinfer") is not None


def _has_xqa(case: Case) -> bool:
    return _has_flashinfer(case) and find_spec("flashinfer.xqa") is not None


RIVALS = {
    "sdpa": Rival(_sdpa(expand=False)),
    "sdpa_packed": Rival(_sdpa_packed, _is_grouped),
    "sdpa_cudnn": Rival(_sdpa_cudnn, lambda case: torch.backends.cudnn.is_available()),
    "sdpa_expanded": Rival(_sdpa(expand=True), _is_grouped),
    "prefix_merge": Rival(_prefix_and_merge),
    "flex": Rival(_flex(tuned=False), lambda case: case.compiled),
    "flex_tuned": Rival(_flex(tuned=True), lambda case: case.compiled),
    "flashinfer": Rival(_flashinfer, _has_flashinfer),
    "xqa": Rival(_xqa, _has_xqa),
}
