"""SPACE's layout in Triton: one program per block of nodes."""

from __future__ import annotations

import torch

from speckernels.ops.space_layout import empty_results
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton

NODES_PER_PROGRAM = 128


@triton.jit
def _kernel(candidates, parents, is_mask, group, BLOCK: tl.constexpr):
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nodes = 1 + candidates * (candidates + 2)
    inside = node < nodes
    mask = node > candidates
    place = node - 1 - candidates  # among the mask tokens
    per_group = tl.maximum(candidates, 1)
    its_group = tl.where(mask, place // per_group, -1)
    opens_group = mask & (place % per_group == 0)
    tl.store(parents + node, tl.where(opens_group, its_group, node - 1), mask=inside)
    tl.store(is_mask + node, mask, mask=inside)
    tl.store(group + node, its_group, mask=inside)


def space_layout(like: torch.Tensor, candidates: int) -> tuple[torch.Tensor, ...]:
    results = empty_results(like, candidates)
    programs = triton.cdiv(len(results.parents), NODES_PER_PROGRAM)
    launch(_kernel, (programs,), candidates, *results, BLOCK=NODES_PER_PROGRAM)
    return tuple(results)


def compiled_variants() -> list[Variant]:
    signature = {"candidates": "i32", "parents": "*i32", "is_mask": "*i1", "group": "*i32"}
    return [Variant(_kernel, signature, {"BLOCK": NODES_PER_PROGRAM})]
