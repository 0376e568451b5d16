"""Tree rejection in Triton: sums of all rows, a program per part of a row, then a walk, a program per tree."""

from __future__ import annotations

import torch

from speckernels.ops.chain_rejection.triton import SCALE, TOKENS_PER_STEP, block_of, in_unit_interval, weights
from speckernels.ops.results import empty_results
from speckernels.ops.tree_rejection import SiblingKind
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton

PARTS = 4  # of a row, each summed by a program
IID = tl.constexpr(int(SiblingKind.iid))
WITHOUT_REPLACEMENT = tl.constexpr(int(SiblingKind.without_replacement))
TOP_K = tl.constexpr(int(SiblingKind.top_k))


@triton.jit
def _row_sums_kernel(
    parents, draft_probs, target_probs, row_sums, nodes, vocabulary, part,
    KIND: tl.constexpr, PARTS: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a part of a row of target and draft; rows of padding and drafts without a child are not needed."""
    row = tl.program_id(0).to(tl.int64)
    node = (row % nodes).to(tl.int32)
    parents += row - node
    index = tl.arange(0, NODES)
    all_parents = tl.load(parents + index, mask=index < nodes, other=-1)
    is_padding = (node > 0) & (tl.load(parents + node) < 0)
    is_parent = tl.sum((all_parents == node).to(tl.int32)) > 0
    start = tl.program_id(1) * part
    end = tl.minimum(start + part, vocabulary)
    to = row_sums + row * 2 * PARTS + tl.program_id(1)
    if not is_padding:
        tl.store(to, _sum(target_probs + row * vocabulary, start, end, BLOCK))
    if is_parent & (KIND != TOP_K):
        tl.store(to + PARTS, _sum(draft_probs + row * vocabulary, start, end, BLOCK))


@triton.jit
def _sum(probs, start, end, BLOCK: tl.constexpr):
    total = tl.full((), 0, tl.int64)
    for at in range(start, end, BLOCK):
        token = at + tl.arange(0, BLOCK)
        total += tl.sum(weights(tl.load(probs + token, mask=token < end, other=0.0)))
    return total


@triton.jit
def _remaining(target, rest, subtracted, token, inside):
    """Remaining weights of tokens at the current node: its row, or `rest` after a rejection."""
    of_row = weights(tl.load(target + token, mask=inside & (subtracted == 0), other=0.0))
    return tl.where(subtracted != 0, tl.load(rest + token, mask=inside & (subtracted != 0), other=0), of_row)


@triton.jit
def _subtract(target, rest, subtracted, per_target, draft, per_draft, vocabulary, BLOCK: tl.constexpr):
    """Subtract the draft's share of each token from the remaining weights; return the new sum.

    Tokens rejected before have weight 0, so their draft weights do not matter here.
    """
    tl.debug_barrier()
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        wanted = _remaining(target, rest, subtracted, token, inside).to(tl.float64) * per_target
        offered = weights(tl.load(draft + token, mask=inside, other=0.0)).to(tl.float64) * per_draft
        these = tl.where(wanted > offered, wanted - offered, 0.0).to(tl.int64)
        tl.store(rest + token, these, mask=inside)
        total += tl.sum(these)
    tl.debug_barrier()
    return total


@triton.jit
def _units(total):
    """Units of 2^-40 per unit of weight."""
    return SCALE / tl.maximum(total, 1).to(tl.float64)


@triton.jit
def _kernel(
    tokens, parents, draft_probs, target_probs, uniforms, row_sums, rest, path, accepted, emitted, nodes, vocabulary,
    KIND: tl.constexpr, PARTS: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    first = tree * nodes
    uniforms += tree * (nodes + 1)
    rest += tree * vocabulary
    index = tl.arange(0, NODES)
    all_parents = tl.load(parents + first + index, mask=index < nodes, other=-1)
    all_tokens = tl.load(tokens + first + index, mask=index < nodes, other=-1)

    current = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    subtracted = tl.full((), 0, tl.int32)  # whether `rest` has the remaining weights
    draft_total = tl.full((), 0, tl.int64)
    row_sums += first * 2 * PARTS + tl.arange(0, PARTS)
    total = tl.sum(tl.load(row_sums))
    if KIND != TOP_K:
        draft_total = tl.sum(tl.load(row_sums + PARTS))

    # Children follow their parent, so one pass meets those of each accepted node in order.
    for node in range(1, nodes):
        token = tl.load(tokens + first + node)
        verified = (tl.load(parents + first + node) == current) & (token >= 0) & (token < vocabulary)
        draft = draft_probs + (first + current) * vocabulary
        target = target_probs + (first + current) * vocabulary
        drafted = tl.full((), 0, tl.int64)
        if KIND != IID:
            same = (all_parents == current) & (all_tokens == token) & (index > current) & (index < node)
            verified = verified & (tl.sum(same.to(tl.int32)) == 0)
        if KIND != TOP_K:
            drafted = weights(tl.load(draft + token, mask=verified, other=0.0))
            verified = verified & (drafted > 0)
        if verified:
            remaining = _remaining(target, rest, subtracted, token, True)
            if KIND == TOP_K:
                wanted = remaining.to(tl.float64)
                offered = total.to(tl.float64)
            else:
                wanted = remaining.to(tl.float64) * _units(total)
                offered = drafted.to(tl.float64) * _units(draft_total)
            if in_unit_interval(tl.load(uniforms + node)) * offered < wanted:
                current = node
                depth += 1
                tl.store(path + first + depth, node)
                tl.store(emitted + first + depth - 1, token)
                subtracted = tl.full((), 0, tl.int32)
                total = tl.sum(tl.load(row_sums + node * 2 * PARTS))
                if KIND != TOP_K:
                    draft_total = tl.sum(tl.load(row_sums + node * 2 * PARTS + PARTS))
            elif KIND == TOP_K:
                total -= remaining
            else:
                per_target, per_draft = _units(total), _units(draft_total)
                total = _subtract(target, rest, subtracted, per_target, draft, per_draft, vocabulary, BLOCK)
                subtracted = tl.full((), 1, tl.int32)
                if KIND == WITHOUT_REPLACEMENT:
                    draft_total -= drafted

    target = target_probs + (first + current) * vocabulary
    if total == 0:  # nothing is left: draw from the target's row
        subtracted = tl.full((), 0, tl.int32)
        total = tl.sum(tl.load(row_sums + current * 2 * PARTS))
    elif KIND == TOP_K:  # less the tokens of all children
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocabulary
            tl.store(rest + token, weights(tl.load(target + token, mask=inside, other=0.0)), mask=inside)
        tl.debug_barrier()
        child = (all_parents == current) & (index > current) & (all_tokens >= 0) & (all_tokens < vocabulary)
        tl.store(rest + all_tokens, tl.full([NODES], 0, tl.int64), mask=child)
        tl.debug_barrier()
        subtracted = tl.full((), 1, tl.int32)
    drawn_at = (in_unit_interval(tl.load(uniforms + nodes)) * total.to(tl.float64)).to(tl.int64)
    last = tl.full((), 0, tl.int64)
    before = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        these = _remaining(target, rest, subtracted, token, token < vocabulary)
        passed = (token < vocabulary) & (before + tl.cumsum(these, 0) <= drawn_at)
        last += tl.sum(passed.to(tl.int64))
        before += tl.sum(these)
    last = tl.where(total > 0, last, -1)

    tl.store(accepted + tree, depth)
    tl.store(path + first, 0)
    tl.store(path + first + index, tl.full([NODES], -1, tl.int32), mask=(index > depth) & (index < nodes))
    tl.store(emitted + first + index, tl.where(index == depth, last, -1), mask=(index >= depth) & (index < nodes))


def tree_rejection(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    kind: int,
) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    trees, nodes, vocabulary = target_probs.shape
    if trees == 0:
        return tuple(results)
    rest, row_sums = tokens.new_empty(trees, vocabulary), tokens.new_empty(trees, nodes, 2, PARTS)
    draft = target_probs if draft_probs is None else draft_probs  # top-k reads none
    shape = {
        "KIND": kind,
        "PARTS": PARTS,
        "NODES": max(32, triton.next_power_of_2(nodes)),
        "BLOCK": block_of(vocabulary),
    }
    launch(
        _row_sums_kernel, (trees * nodes, PARTS),
        parents, draft, target_probs, row_sums, nodes, vocabulary, triton.cdiv(vocabulary, PARTS), **shape,
    )  # fmt: skip
    launch(
        _kernel, (trees,),
        tokens, parents, draft, target_probs, uniforms, row_sums, rest, *results, nodes, vocabulary, **shape,
    )  # fmt: skip
    return tuple(results)


def compiled_variants() -> list[Variant]:
    inputs = {"parents": "*i32", "draft_probs": "*fp32", "target_probs": "*fp32", "row_sums": "*i64"}
    inputs |= {"nodes": "i32", "vocabulary": "i32"}
    walk = {
        "tokens": "*i64",
        "uniforms": "*fp64",
        "rest": "*i64",
        "path": "*i32",
        "accepted": "*i32",
        "emitted": "*i64",
    }
    sizes = {"PARTS": PARTS, "NODES": 64, "BLOCK": TOKENS_PER_STEP}
    return [
        Variant(kernel, inputs | others, {"KIND": int(kind), **sizes})
        for kind in SiblingKind
        for kernel, others in ((_kernel, walk), (_row_sums_kernel, {"part": "i32"}))
    ]
