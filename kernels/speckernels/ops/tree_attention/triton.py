"""Tree attention in Triton: one program per part of the cache, KV head and tile of rows.

A row is a pair (node, query head of the group), so that keys are read once for a group. The
parts are merged by a second small kernel, since Triton does not promise that the stores of all
threads of a program come before its atomic operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from speckernels.ops.tree_attention import (
    FULL_SHARED_BYTES,
    MIN_TILES,
    SMALL_SHARED_BYTES,
    empty_result,
    shared_bytes,
    split_count,
)
from speckernels.runtime.errors import Unsupported
from speckernels.runtime.launch import multiprocessors
from speckernels.runtime.triton_runtime import INTERPRETED, Variant, launch, tl, triton

MERGED_ROWS = 16
MAX_DIM = 256
STAGES = {False: 3, True: 2}  # tiles of the cache on their way; fewer where shared memory is small


@triton.jit
def _part(
    context_lens, tail_lens, batch, nodes, capacity, splits,
    TAILS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    """Context, slots in use, and tiles per part of a sequence."""
    context = tl.load(context_lens + batch)
    tail = tl.load(tail_lens + batch) if TAILS else nodes
    end = tl.minimum(context + tail, capacity)
    tiles = (end + BLOCK_N - 1) // BLOCK_N
    return context, end, tl.maximum((tiles + splits - 1) // splits, MIN_SPLIT)


@triton.jit
def _write(out, acc, row_sum, at, d, dim, inside):
    """Weighted mean of each row; 0 for a row without visible keys."""
    seen = row_sum > 0
    attended = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    stored = inside[:, None] & (d < dim)[None, :]
    tl.store(out + at[:, None] * dim + d[None, :], attended.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _attend(scores, v, acc, row_max, row_sum):
    """Online softmax over one tile; scores in units of log 2."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def _split_kernel(
    query, keys, values, mask_bits, context_lens, tail_lens, out,
    part_acc, part_max, part_sum,
    nodes, words, group, heads, dim, capacity, splits, row_tiles, log2_scale,
    query_batch, query_head, query_node, key_batch, key_head, key_slot, value_batch, value_head, value_slot,
    TAILS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MIN_SPLIT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    row_tile = tl.program_id(0) % row_tiles
    split = tl.program_id(0) // row_tiles
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    context, end, per_split = _part(context_lens, tail_lens, batch, nodes, capacity, splits, TAILS, BLOCK_N, MIN_SPLIT)
    first = split * per_split
    last = tl.minimum(first + per_split, (end + BLOCK_N - 1) // BLOCK_N)
    if (not DIRECT) & (first >= last):
        return

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < nodes * group
    node = (row // group).to(tl.int64)
    head = kv_head * group + row % group
    d = tl.arange(0, BLOCK_D)
    has_d = (d < dim)[None, :]
    query += batch * query_batch + head[:, None] * query_head + node[:, None] * query_node + d[None, :]
    q = tl.load(query, mask=inside[:, None] & has_d, other=0.0)
    keys += batch * key_batch + kv_head * key_head
    values += batch * value_batch + kv_head * value_head
    mask_bits += (batch * nodes + node) * words

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    whole = tl.minimum(tl.maximum(context // BLOCK_N, first), last)  # tiles before this one lie in the context
    for tile in range(first, whole):
        slot = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        k_rows, v_rows = slot * key_slot, slot * value_slot
        k = tl.load(keys + k_rows[:, None] + d[None, :], mask=has_d, other=0.0)
        v = tl.load(values + v_rows[:, None] + d[None, :], mask=has_d, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        acc, row_max, row_sum = _attend(scores, v, acc, row_max, row_sum)
    for tile in range(whole, last):
        slot = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        used = slot < end
        # Slots behind the tail are not loaded: they may hold NaN, and 0 * NaN is NaN.
        k_rows, v_rows = slot * key_slot, slot * value_slot
        k = tl.load(keys + k_rows[:, None] + d[None, :], mask=used[:, None] & has_d, other=0.0)
        v = tl.load(values + v_rows[:, None] + d[None, :], mask=used[:, None] & has_d, other=0.0)
        place = slot - context
        in_mask = inside[:, None] & (used & (place >= 0) & (place < 32 * words))[None, :]
        bits = tl.load(mask_bits[:, None] + (place >> 5)[None, :], mask=in_mask, other=0)
        is_set = ((bits >> (place & 31).to(tl.int32)[None, :]) & 1) != 0
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
        scores = tl.where((used & (place < 0))[None, :] | is_set, scores, float("-inf"))
        acc, row_max, row_sum = _attend(scores, v, acc, row_max, row_sum)

    if DIRECT:
        at = (batch * nodes + node) * heads + head
        _write(out, acc, row_sum, at, d, dim, inside)
    else:
        rows = nodes * group
        at = ((batch * tl.num_programs(1) + kv_head) * splits + split) * rows + row
        tl.store(part_max + at, row_max, mask=inside)
        tl.store(part_sum + at, row_sum, mask=inside)
        tl.store(part_acc + at[:, None] * dim + d[None, :], acc, mask=inside[:, None] & has_d)


@triton.jit
def _merge_kernel(
    part_acc, part_max, part_sum, context_lens, tail_lens, out,
    nodes, group, heads, dim, capacity, splits,
    TAILS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    _, end, per_split = _part(context_lens, tail_lens, batch, nodes, capacity, splits, TAILS, BLOCK_N, MIN_SPLIT)
    parts = (((end + BLOCK_N - 1) // BLOCK_N) + per_split - 1) // per_split
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = nodes * group
    inside = row < rows
    d = tl.arange(0, BLOCK_D)
    stored = inside[:, None] & (d < dim)[None, :]
    base = (batch * tl.num_programs(1) + kv_head) * splits * rows + row

    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for part in range(parts):
        at = base + part * rows
        its_max = tl.load(part_max + at, mask=inside, other=float("-inf"))
        new_max = tl.maximum(row_max, its_max)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        old, new = tl.exp2(row_max - shift), tl.exp2(its_max - shift)
        its_acc = tl.load(part_acc + at[:, None] * dim + d[None, :], mask=stored, other=0.0)
        acc = acc * old[:, None] + its_acc * new[:, None]
        row_sum = row_sum * old + tl.load(part_sum + at, mask=inside, other=0.0) * new
        row_max = new_max
    at = (batch * nodes + row // group) * heads + kv_head * group + row % group
    _write(out, acc, row_sum, at, d, dim, inside)


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
    if query.dtype == torch.float64 or dim > MAX_DIM:
        raise Unsupported(
            f"the triton backend takes no {query.dtype} with D = {dim}; give 16 or 32 bits, D to {MAX_DIM}"
        )
    if INTERPRETED and query.dtype == torch.bfloat16:  # the interpreter would compute with the raw bits
        wide = (query.float(), keys.float(), values.float())
        return tree_attention(*wide, mask_bits, context_lens, scale, tail_lens).bfloat16()
    kv_heads, capacity = keys.shape[1:3]
    group = heads // kv_heads
    rows = nodes * group
    tight = shared_bytes(query.device) < FULL_SHARED_BYTES
    blocks = _blocks(rows, dim, query.element_size(), tight=tight)
    row_tiles = triton.cdiv(rows, blocks["BLOCK_M"])
    splits = split_count(
        row_tiles * kv_heads * batch,
        triton.cdiv(capacity, blocks["BLOCK_N"]),
        2 * multiprocessors(query.device),
    )
    out = empty_result(query)
    parts = (batch, kv_heads, splits, rows) if splits > 1 else (0,)
    part_acc, part_max, part_sum = (
        query.new_empty(shape, dtype=torch.float32) for shape in ((*parts, dim), parts, parts)
    )
    strides = [stride for tensor in (query, keys, values) for stride in tensor.stride()[:3]]
    flags = {"TAILS": tail_lens is not None}
    tail_lens = context_lens if tail_lens is None else tail_lens  # not read
    launch(
        _split_kernel, (row_tiles * splits, kv_heads, batch),
        query, keys, values, mask_bits, context_lens, tail_lens, out,
        part_acc, part_max, part_sum, nodes, mask_bits.shape[2], group, heads, dim, capacity,
        splits, row_tiles, scale * math.log2(math.e), *strides, **flags, **blocks,
        MIN_SPLIT=MIN_TILES, DIRECT=splits == 1, num_warps=_warps(blocks), num_stages=STAGES[tight],
    )  # fmt: skip
    if splits > 1:
        launch(
            _merge_kernel, (triton.cdiv(rows, MERGED_ROWS), kv_heads, batch),
            part_acc, part_max, part_sum, context_lens, tail_lens, out,
            nodes, group, heads, dim, capacity, splits, **flags,
            BLOCK_N=blocks["BLOCK_N"], BLOCK_D=blocks["BLOCK_D"], ROWS=MERGED_ROWS, MIN_SPLIT=MIN_TILES,
        )  # fmt: skip
    return out


def _blocks(rows: int, dim: int, element_bytes: int, *, tight: bool) -> dict[str, int]:
    """Tile sizes, small enough for registers and shared memory. tight : for a GPU with little shared memory"""
    padded = max(16, triton.next_power_of_2(dim))
    wide = padded * element_bytes > 256
    sizes = (16, 64, 128)[: 3 - wide - tight]
    return {
        "BLOCK_M": next((size for size in sizes if rows <= size), sizes[-1]),
        "BLOCK_N": 32 if wide else 64,
        "BLOCK_D": padded,
    }


def _warps(blocks: Mapping[str, int]) -> int:
    return 8 if blocks["BLOCK_M"] == 128 else 4


def compiled_variants() -> list[Variant]:
    names = ("nodes", "words", "group", "heads", "dim", "capacity", "splits", "row_tiles")
    sizes = dict.fromkeys(names, "i32")
    strides = {
        f"{tensor}_{axis}": "i64"
        for tensor, last in (("query", "node"), ("key", "slot"), ("value", "slot"))
        for axis in ("batch", "head", last)
    }
    parts = dict.fromkeys(("part_acc", "part_max", "part_sum"), "*fp32")
    lens = dict.fromkeys(("context_lens", "tail_lens"), "*i32")
    variants = []
    for kind, element_bytes, rows, dim, direct, tight, tails in (
        ("*bf16", 2, 256, 128, False, False, False),
        ("*bf16", 2, 256, 128, False, False, True),
        ("*fp16", 2, 4, 64, True, False, True),
        ("*fp32", 4, 20, 96, False, False, False),
        ("*bf16", 2, 256, 192, False, False, False),
        ("*bf16", 2, 256, 128, False, True, True),
        ("*bf16", 2, 16, 128, False, True, False),
        ("*fp16", 2, 256, 64, True, True, False),
        ("*bf16", 2, 256, 256, False, True, False),
        ("*fp32", 4, 256, 128, False, True, False),
    ):
        tensors = dict.fromkeys(("query", "keys", "values", "out"), kind) | parts | lens
        tensors |= {"mask_bits": "*i32"}
        blocks = _blocks(rows, dim, element_bytes, tight=tight)
        signature = tensors | sizes | strides | {"log2_scale": "fp32"}
        constants = {**blocks, "TAILS": tails, "MIN_SPLIT": MIN_TILES, "DIRECT": direct}
        options = {"num_stages": STAGES[tight], "num_warps": _warps(blocks)}
        limit = SMALL_SHARED_BYTES if tight else FULL_SHARED_BYTES
        variants.append(Variant(_split_kernel, signature, constants, options, limit))
    merged = {"out": "*bf16"} | lens | parts | sizes
    for name in ("words", "row_tiles"):
        del merged[name]
    sizes_of_merge = {"BLOCK_N": 64, "BLOCK_D": 128, "ROWS": MERGED_ROWS, "MIN_SPLIT": MIN_TILES}
    return [*variants, Variant(_merge_kernel, merged, {**sizes_of_merge, "TAILS": True})]
