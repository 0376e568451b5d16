"""Attention of a draft tree over a long cache, beside SDPA, FlexAttention and FlashInfer.

The others get what they need prepared outside the clock: boolean masks, block masks, plans.
They see the cache cut to its used length.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from speckernels.bench.cases.base import Arguments, Case, Operation, Rival, depths, random_tree, relative_error
from speckernels.bench.rows import Work

HEAD_SIZE = 128
SPARE_SLOTS = 64  # the cache is larger than what is used of it
# Relative to the reference, 2-norms: rounding of the operands and of the weights.
ERRORS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
FLASHINFER_WORKSPACE_BYTES = 256 << 20


def _case(nodes: int, context: int, batch: int, kv_heads: int, compiled: bool = False) -> Case:
    shape = {"nodes": nodes, "context": context, "batch": batch, "q_heads": 32, "kv_heads": kv_heads, "head": HEAD_SIZE}
    return Case("tree_attention", shape, torch.bfloat16, compiled)


def _small(nodes: int, context: int, batch: int) -> Case:
    shape = {"nodes": nodes, "context": context, "batch": batch, "q_heads": 4, "kv_heads": 2, "head": 32}
    return Case("tree_attention", shape, torch.float32, compiled=nodes == 8)


def _tree(case: Case) -> torch.Tensor:
    """parents [1, n]: one tree per size, the same for the whole batch."""
    return random_tree(case.shape["nodes"], 1, torch.Generator().manual_seed(case.shape["nodes"]))


def _sees(case: Case) -> torch.Tensor:
    """Whether row i sees tree node j, bool [n, n]."""
    parents = _tree(case)[0].tolist()
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        sees[node] |= sees[parent]
    return sees


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    from speckernels.ops.tree_metadata.reference import pack_bits

    sizes = case.shape
    batch, capacity = sizes["batch"], sizes["context"] + sizes["nodes"] + SPARE_SLOTS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(case.dtype)

    # A model's projection gives [B, n, Hq, D] and passes it on transposed.
    query = normal(batch, sizes["nodes"], sizes["q_heads"], sizes["head"]).transpose(1, 2)
    keys, values = (normal(batch, sizes["kv_heads"], capacity, sizes["head"]) for _ in range(2))
    mask_bits = pack_bits(_sees(case)).repeat(batch, 1, 1).to(generator.device)
    context_lens = torch.full((batch,), sizes["context"], dtype=torch.int32, device=generator.device)
    return query, keys, values, mask_bits, context_lens, sizes["head"] ** -0.5


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads K and V once per KV head, Q and the mask; writes the output.

    bytes = s D B (2 Hkv (c + n) + 2 Hq n) + 4 B n ceil(n / 32) for elements of s bytes;
    flops = 4 D Hq B times the visible pairs, n c + sum of (depth + 1).
    """
    sizes = case.shape
    nodes, batch, context = sizes["nodes"], sizes["batch"], sizes["context"]
    pairs = nodes * context + int(depths(_tree(case)).sum()) + nodes
    cache = 2 * sizes["kv_heads"] * (context + nodes)
    rows = 2 * sizes["q_heads"] * nodes
    read = case.dtype.itemsize * sizes["head"] * batch * (cache + rows) + 4 * batch * nodes * ((nodes + 31) // 32)
    return Work(read, 4 * sizes["head"] * sizes["q_heads"] * batch * pairs)


def _check(expected: Any, actual: Any, case: Case) -> None:
    relative_error(expected, actual, ERRORS[case.dtype], "output")


def _whole_mask(case: Case, device: torch.device) -> torch.Tensor:
    """Whether row i sees key j, bool [n, context + n]."""
    prefix = torch.ones(case.shape["nodes"], case.shape["context"], dtype=torch.bool)
    return torch.cat((prefix, _sees(case)), 1).to(device)


def _sdpa(expand: bool) -> Callable[[Case, Arguments], Callable[..., torch.Tensor]]:
    """SDPA with a boolean mask; K and V either shared by `enable_gqa` or expanded inside the clock."""

    def prepare(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
        groups = case.shape["q_heads"] // case.shape["kv_heads"]
        used, mask = case.shape["context"] + case.shape["nodes"], _whole_mask(case, args[0].device)

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


def _sdpa_packed(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """SDPA with the query heads of a KV head as rows of one matrix, so that keys and values are read once for them."""
    groups = case.shape["q_heads"] // case.shape["kv_heads"]
    used, mask = case.shape["context"] + case.shape["nodes"], _whole_mask(case, args[0].device).repeat(groups, 1)

    def run(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bits: Any, context: Any, scale: float
    ) -> torch.Tensor:
        batch, _, nodes, dim = query.shape
        rows = query.reshape(batch, keys.shape[1], groups * nodes, dim)
        out = scaled_dot_product_attention(rows, keys[:, :, :used], values[:, :, :used], attn_mask=mask, scale=scale)
        return out.reshape(query.shape).transpose(1, 2)

    return run


def _is_headline(case: Case) -> bool:
    """Trees of 1 to 128 nodes over 8,192 tokens, one or eight sequences; chains and trees over more and less."""
    nodes, context, batch, kv_heads = (case.shape[name] for name in ("nodes", "context", "batch", "kv_heads"))
    of_all = nodes in (1, 16, 64, 128) and context == 8192
    return kv_heads == 8 and (of_all or (nodes in (1, 64) and batch == 1))


def _flex(case: Case, args: Arguments) -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled, with a block mask of the tree."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    context, nodes = case.shape["context"], case.shape["nodes"]
    sees = _sees(case).to(args[0].device)

    def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (key < context) | sees[row, (key - context).clamp(min=0)]

    mask = create_block_mask(visible, None, None, nodes, context + nodes, device=args[0].device.type)
    compiled = torch.compile(flex_attention, dynamic=False)
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
        custom_mask=_whole_mask(case, device).flatten().repeat(batch),
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


_NODES, _CONTEXTS = (64, 8, 128, 1, 16, 32), (8192, 1024, 32768)

OPERATION = Operation(
    name="tree_attention",
    cases=tuple(
        _case(nodes, context, batch, kv_heads, compiled=kv_heads == 8 and nodes in (8, 64))
        for kv_heads in (8, 32)
        for nodes in _NODES
        for batch in (1, 8)
        for context in _CONTEXTS
    ),
    small=(_small(8, 50, 1), _small(40, 70, 2)),
    inputs=_inputs,
    work=_work,
    check=_check,
    quick=9,
    headline=_is_headline,
    rivals={
        "sdpa": Rival(_sdpa(expand=False)),
        "sdpa_packed": Rival(_sdpa_packed, lambda case: case.shape["q_heads"] > case.shape["kv_heads"]),
        "sdpa_expanded": Rival(_sdpa(expand=True), lambda case: case.shape["q_heads"] > case.shape["kv_heads"]),
        "flex": Rival(_flex, lambda case: case.compiled),
        "flashinfer": Rival(_flashinfer, lambda case: find_spec("flashinfer") is not None),
    },
)
