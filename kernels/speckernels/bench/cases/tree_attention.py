"""Attention of a draft tree over a long cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from speckernels.bench.cases.attention_rivals import PAGE_SLOTS, RIVALS, sees_of, tree_of
from speckernels.bench.cases.base import Arguments, Case, Operation, Rival, Work, depths, relative_error
from speckernels.ops.tree_attention import pack_bits, tree_attention

HEAD_SIZE = 128
SPARE_SLOTS = 64  # the cache is larger than what is used of it
# Relative to the reference, 2-norms: rounding of the operands and of the weights.
ERRORS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def _case(nodes: int, context: int, batch: int, kv_heads: int, *, compiled: bool = False, page: int = 0) -> Case:
    shape = {"nodes": nodes, "context": context, "batch": batch, "q_heads": 32, "kv_heads": kv_heads, "head": HEAD_SIZE}
    if page:
        shape["page"] = page
    return Case("tree_attention", shape, torch.bfloat16, compiled)


def _small(nodes: int, context: int, batch: int, page: int = 0) -> Case:
    shape = {"nodes": nodes, "context": context, "batch": batch, "q_heads": 4, "kv_heads": 2, "head": 32}
    if page:
        shape["page"] = page
    return Case("tree_attention", shape, torch.float32, compiled=nodes == 8 and not page)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    sizes = case.shape
    batch, used = sizes["batch"], sizes["context"] + sizes["nodes"] + SPARE_SLOTS
    capacity = -(-used // PAGE_SLOTS) * PAGE_SLOTS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(case.dtype)

    # A model's projection gives [B, n, Hq, D] and passes it on transposed.
    query = normal(batch, sizes["nodes"], sizes["q_heads"], sizes["head"]).transpose(1, 2)
    keys, values = (normal(batch, sizes["kv_heads"], capacity, sizes["head"]) for _ in range(2))
    mask_bits = pack_bits(sees_of(case)).repeat(batch, 1, 1).to(generator.device)
    context_lens = torch.full((batch,), sizes["context"], dtype=torch.int32, device=generator.device)
    args = (query, keys, values, mask_bits, context_lens, sizes["head"] ** -0.5)
    if "page" not in sizes:
        return args
    # The same cache in pages, as an engine's allocator leaves them: in no order.
    pages = batch * capacity // sizes["page"]
    table = torch.randperm(pages, generator=generator, device=generator.device)
    paged = []
    for cache in (keys, values):
        in_order = cache.unflatten(2, (-1, sizes["page"])).transpose(1, 2).flatten(0, 1)  # [B P, Hkv, S, D]
        paged.append(torch.empty_like(in_order).index_copy_(0, table, in_order))
    return args[0], *paged, *args[3:], None, None, table.view(batch, -1).int()


def _public(*args: Any) -> torch.Tensor:
    return tree_attention(*args[:6], block_table=args[8] if len(args) > 6 else None)


def _in_one_piece(rival: Rival) -> Rival:
    """The rival for a contiguous cache; pages are measured as well to see their cost."""
    return replace(rival, applies=lambda case: "page" not in case.shape and rival.applies(case))


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads K and V once per KV head, Q and the mask; writes the output. A block table's bytes are not counted.

    bytes = s D B (2 Hkv (c + n) + 2 Hq n) + 4 B n ceil(n / 32) for elements of s bytes;
    flops = 4 D Hq B times the visible pairs, n c + sum of (depth + 1).
    """
    sizes = case.shape
    nodes, batch, context = sizes["nodes"], sizes["batch"], sizes["context"]
    pairs = nodes * context + int(depths(tree_of(case)).sum()) + nodes
    cache = 2 * sizes["kv_heads"] * (context + nodes)
    rows = 2 * sizes["q_heads"] * nodes
    read = case.dtype.itemsize * sizes["head"] * batch * (cache + rows) + 4 * batch * nodes * ((nodes + 31) // 32)
    return Work(read, 4 * sizes["head"] * sizes["q_heads"] * batch * pairs)


def _check(expected: Any, actual: Any, case: Case) -> None:
    relative_error(expected, actual, ERRORS[case.dtype], "output")


def _is_headline(case: Case) -> bool:
    """Trees of 1 to 128 nodes over 8,192 tokens, one or eight sequences; chains and trees over more and less."""
    nodes, context, batch, kv_heads = (case.shape[name] for name in ("nodes", "context", "batch", "kv_heads"))
    of_all = nodes in (1, 16, 64, 128) and context == 8192
    return "page" not in case.shape and kv_heads == 8 and (of_all or (nodes in (1, 64) and batch == 1))


_NODES, _CONTEXTS = (64, 8, 128, 1, 16, 32), (8192, 1024, 32768)

OPERATION = Operation(
    name="tree_attention",
    cases=tuple(
        _case(nodes, context, batch, kv_heads, compiled=kv_heads == 8 and nodes in (8, 64))
        for kv_heads in (8, 32)
        for nodes in _NODES
        for batch in (1, 8)
        for context in _CONTEXTS
    )
    + tuple(_case(64, 8192, batch, 8, page=page) for batch in (8, 1) for page in (16, 64)),
    small=(_small(8, 50, 1), _small(40, 70, 2), _small(8, 50, 2, page=16)),
    inputs=_inputs,
    work=_work,
    check=_check,
    headline=_is_headline,
    rivals={name: _in_one_piece(rival) for name, rival in RIVALS.items()},
    public=_public,
)
