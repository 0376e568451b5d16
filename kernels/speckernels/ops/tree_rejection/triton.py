"""Tree rejection in Triton: one program per tree."""

from __future__ import annotations

import torch

from speckernels.ops.chain_rejection.triton import SCALE, TOKENS_PER_STEP, block_of, in_unit_interval, weights
from speckernels.ops.results import empty_results
from speckernels.ops.tree_rejection import SiblingKind
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton

IID = tl.constexpr(int(SiblingKind.iid))
WITHOUT_REPLACEMENT = tl.constexpr(int(SiblingKind.without_replacement))
TOP_K = tl.constexpr(int(SiblingKind.top_k))


@triton.jit
def _enter(target, rest, vocabulary, BLOCK: tl.constexpr):
    """Set rest to a row's weights; returns their sum."""
    tl.debug_barrier()
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        these = weights(tl.load(target + token, mask=token < vocabulary, other=0.0))
        tl.store(rest + token, these, mask=token < vocabulary)
        total += tl.sum(these)
    tl.debug_barrier()
    return total


@triton.jit
def _sum(probs, vocabulary, BLOCK: tl.constexpr):
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        total += tl.sum(weights(tl.load(probs + token, mask=token < vocabulary, other=0.0)))
    return total


@triton.jit
def _subtract(rest, per_target, draft, per_draft, vocabulary, BLOCK: tl.constexpr):
    """Take the draft's share of each token from what remains; returns the new sum.

    Nothing remains of tokens rejected before, so their draft weights no longer matter here.
    """
    tl.debug_barrier()
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        wanted = tl.load(rest + token, mask=inside, other=0).to(tl.float64) * per_target
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
    tokens, parents, draft_probs, target_probs, uniforms, rest, path, accepted, emitted, nodes, vocabulary,
    KIND: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr,
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
    draft_total = tl.full((), 0, tl.int64)
    total = _enter(target_probs + first * vocabulary, rest, vocabulary, BLOCK)
    if KIND != TOP_K:
        draft_total = _sum(draft_probs + first * vocabulary, vocabulary, BLOCK)

    # Children follow their parent, so one pass meets those of each accepted node in order.
    for node in range(1, nodes):
        token = tl.load(tokens + first + node)
        verified = (tl.load(parents + first + node) == current) & (token >= 0) & (token < vocabulary)
        draft = draft_probs + (first + current) * vocabulary
        drafted = tl.full((), 0, tl.int64)
        if KIND != IID:
            same = (all_parents == current) & (all_tokens == token) & (index > current) & (index < node)
            verified = verified & (tl.sum(same.to(tl.int32)) == 0)
        if KIND != TOP_K:
            drafted = weights(tl.load(draft + token, mask=verified, other=0.0))
            verified = verified & (drafted > 0)
        if verified:
            remaining = tl.load(rest + token)
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
                total = _enter(target_probs + (first + node) * vocabulary, rest, vocabulary, BLOCK)
                if KIND != TOP_K:
                    draft_total = _sum(draft_probs + (first + node) * vocabulary, vocabulary, BLOCK)
            elif KIND == TOP_K:
                tl.debug_barrier()
                tl.store(rest + token, 0)
                tl.debug_barrier()
                total -= remaining
            else:
                total = _subtract(rest, _units(total), draft, _units(draft_total), vocabulary, BLOCK)
                if KIND == WITHOUT_REPLACEMENT:
                    draft_total -= drafted

    if total == 0:
        total = _enter(target_probs + (first + current) * vocabulary, rest, vocabulary, BLOCK)
    drawn_at = (in_unit_interval(tl.load(uniforms + nodes)) * total.to(tl.float64)).to(tl.int64)
    last = tl.full((), 0, tl.int64)
    before = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        these = tl.load(rest + token, mask=token < vocabulary, other=0)
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
    rest = tokens.new_empty(trees, vocabulary)
    draft = target_probs if draft_probs is None else draft_probs  # top-k reads none
    launch(
        _kernel, (trees,),
        tokens, parents, draft, target_probs, uniforms, rest, *results, nodes, vocabulary,
        KIND=kind, NODES=max(32, triton.next_power_of_2(nodes)), BLOCK=block_of(vocabulary),
    )  # fmt: skip
    return tuple(results)


def compiled_variants() -> list[Variant]:
    signature = {"tokens": "*i64", "parents": "*i32", "draft_probs": "*fp32", "target_probs": "*fp32"}
    signature |= {"uniforms": "*fp64", "rest": "*i64", "path": "*i32", "accepted": "*i32", "emitted": "*i64"}
    signature |= {"nodes": "i32", "vocabulary": "i32"}
    sizes = {"NODES": 64, "BLOCK": TOKENS_PER_STEP}
    return [Variant(_kernel, signature, {"KIND": int(kind), **sizes}) for kind in SiblingKind]
