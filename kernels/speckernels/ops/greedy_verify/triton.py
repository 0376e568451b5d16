"""Greedy verification in Triton: one program per tree."""

from __future__ import annotations

import torch

from speckernels.ops.results import empty_results
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton


@triton.jit
def longest_path(
    link, tree, tokens, parents, choices, nodes, path, accepted, emitted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the deepest path. link [BLOCK]: a node's parent if it is accepted once that is, else -1."""
    first = tree * nodes
    node = tl.arange(0, BLOCK)
    ancestor = tl.where(node < nodes, node, -1)
    depth = tl.zeros([BLOCK], tl.int32)
    while tl.max(ancestor) > 0:
        below = ancestor > 0
        depth += below.to(tl.int32)
        ancestor = tl.where(below, tl.gather(link, tl.maximum(ancestor, 0), 0), ancestor)
    # The deepest, and the lowest index among those.
    best = tl.max(tl.where(ancestor == 0, depth * BLOCK + (BLOCK - 1 - node), -1))
    length = best // BLOCK
    last = BLOCK - 1 - best % BLOCK

    tl.store(accepted + tree, length)
    tl.store(path + first + node, tl.full([BLOCK], -1, tl.int32), mask=(node > length) & (node < nodes))
    tl.store(emitted + first + node, tl.full([BLOCK], -1, tl.int64), mask=(node > length) & (node < nodes))
    tl.store(emitted + first + length, tl.load(choices + first + last))
    step = length
    current = last
    while step > 0:
        tl.store(path + first + step, current)
        tl.store(emitted + first + step - 1, tl.load(tokens + first + current))
        current = tl.load(parents + first + current)
        step -= 1
    tl.store(path + first, 0)


@triton.jit
def _kernel(
    tokens, parents, choices, nodes, path, accepted, emitted,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0).to(tl.int64)
    first = tree * nodes
    node = tl.arange(0, BLOCK)
    inside = node < nodes
    parent = tl.load(parents + first + node, mask=inside, other=-1)
    token = tl.load(tokens + first + node, mask=inside, other=-1)
    verified = (parent >= 0) & (parent < node) & (token >= 0)
    choice = tl.load(choices + first + parent, mask=verified, other=-1)
    link = tl.where(verified & (token == choice), parent, -1)
    longest_path(link, tree, tokens, parents, choices, nodes, path, accepted, emitted, BLOCK)


def greedy_verify(tokens: torch.Tensor, parents: torch.Tensor, choices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results = empty_results(parents)
    trees, nodes = parents.shape
    launch(_kernel, (trees,), tokens, parents, choices, nodes, *results, BLOCK=max(32, triton.next_power_of_2(nodes)))
    return tuple(results)


def compiled_variants() -> list[Variant]:
    signature = {"tokens": "*i64", "parents": "*i32", "choices": "*i64", "nodes": "i32"}
    signature |= {"path": "*i32", "accepted": "*i32", "emitted": "*i64"}
    return [Variant(_kernel, signature, {"BLOCK": block}) for block in (32, 64, 1024)]
