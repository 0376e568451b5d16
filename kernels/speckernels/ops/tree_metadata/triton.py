"""Tree metadata in Triton: one program per tree and 32 nodes."""

from __future__ import annotations

import torch

from speckernels.ops.tree_metadata import empty_results
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton

NODES_PER_PROGRAM = 32


@triton.jit
def _kernel(
    parents, context_lens, mask_bits, positions, first_child, next_sibling, nodes, words,
    BLOCK: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    parents += tree * nodes
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = node < nodes
    parent = tl.load(parents + node, mask=inside, other=-1)
    used = (parent >= 0) | (node == 0)

    word = tl.arange(0, PADDED // 32)
    bits = tl.zeros([BLOCK, PADDED // 32], tl.int32)
    ancestor = tl.where(inside, node, -1)
    depth = tl.zeros([BLOCK], tl.int32) - 1
    while tl.max(ancestor) >= 0:
        on_path = ancestor >= 0
        bit = tl.where(on_path, 1, 0) << (ancestor & 31)
        bits |= tl.where(word[None, :] == (ancestor >> 5)[:, None], bit[:, None], 0)
        depth += on_path.to(tl.int32)
        above = tl.load(parents + ancestor, mask=ancestor > 0, other=-1)
        ancestor = tl.where(above < ancestor, above, -1)  # else it would be no tree, and endless
    row = tree * nodes + node
    tl.store(mask_bits + row[:, None] * words + word[None, :], bits, mask=inside[:, None] & (word < words)[None, :])
    tl.store(positions + row, tl.load(context_lens + tree) + depth.to(tl.int64), mask=inside)

    child = tl.full([BLOCK], -1, tl.int32)
    sibling = tl.full([BLOCK], -1, tl.int32)
    other = nodes - 1  # no `range`: interpreted by Triton 3.6, it fails with numpy 2.4
    while other >= 0:
        its_parent = tl.load(parents + other)
        is_later = other > node
        child = tl.where(used & is_later & (its_parent == node), other, child)
        sibling = tl.where((parent >= 0) & is_later & (its_parent == parent), other, sibling)
        other -= 1
    tl.store(first_child + row, child, mask=inside)
    tl.store(next_sibling + row, sibling, mask=inside)


def tree_metadata(parents: torch.Tensor, context_lens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    batch, nodes = parents.shape
    padded = max(32, triton.next_power_of_2(nodes))
    launch(
        _kernel,
        (batch, triton.cdiv(nodes, NODES_PER_PROGRAM)),
        parents,
        context_lens,
        *results,
        nodes,
        results.mask_bits.shape[-1],
        BLOCK=NODES_PER_PROGRAM,
        PADDED=padded,
    )
    return tuple(results)


def compiled_variants() -> list[Variant]:
    pointers = {"parents": "*i32", "context_lens": "*i32", "mask_bits": "*i32", "positions": "*i64"}
    pointers |= {"first_child": "*i32", "next_sibling": "*i32"}
    sizes = {"nodes": "i32", "words": "i32"}
    return [Variant(_kernel, pointers | sizes, {"BLOCK": NODES_PER_PROGRAM, "PADDED": padded}) for padded in (32, 64)]
