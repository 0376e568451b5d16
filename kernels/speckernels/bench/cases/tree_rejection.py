"""Rejection sampling down a tree, by the rule that fits how its siblings were drafted."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, Work, random_tree

IID, WITHOUT_REPLACEMENT, TOP_K = range(3)  # as in SiblingKind
MAX_CHILDREN = 8


def _case(batch: int, nodes: int, vocabulary: int, kind: int) -> Case:
    return Case("tree_rejection", {"batch": batch, "nodes": nodes, "vocab": vocabulary, "kind": kind}, torch.float32)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    batch, nodes, vocabulary = (case.shape[name] for name in ("batch", "nodes", "vocab"))
    kind, device = case.shape["kind"], generator.device
    target_logits = 3 * torch.randn(batch, nodes, vocabulary, generator=generator, device=device)
    error = torch.randn(batch, nodes, vocabulary, generator=generator, device=device)
    draft_probs, target_probs = (target_logits + 0.7 * error).softmax(-1), target_logits.softmax(-1)
    if kind == TOP_K:
        drawn = draft_probs.topk(MAX_CHILDREN, -1).indices
    else:
        rows = draft_probs.flatten(0, 1)
        drawn = torch.multinomial(rows, MAX_CHILDREN, replacement=kind == IID, generator=generator)
        drawn = drawn.view(batch, nodes, MAX_CHILDREN)
    parents = random_tree(nodes, batch, generator)
    index = torch.arange(nodes, device=device)
    earlier = (parents[:, :, None] == parents[:, None, :]) & (index[None, :] < index[:, None])
    rank = earlier.sum(-1).clamp(max=MAX_CHILDREN - 1)
    rows = torch.arange(batch, device=device)[:, None]
    tokens = drawn[rows, parents.clamp(min=0).long(), rank]
    uniforms = torch.rand(batch, nodes + 1, generator=generator, device=device, dtype=torch.float64)
    return tokens, parents, None if kind == TOP_K else draft_probs, target_probs, uniforms, kind


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads whole rows of every visited node, since each rule needs their sums.

    4 V bytes of the target, and as much of the draft where the node has children, unless they
    are the top k. Beside it 12 bytes a node (token, parent), and the results, 12 a node. At
    least a sum and, with a draft, a subtraction per entry read.
    """
    batch, nodes, vocabulary = (case.shape[name] for name in ("batch", "nodes", "vocab"))
    rows = 0
    for parents, path in zip(args[1].tolist(), expected[0].tolist(), strict=True):
        visited = {node for node in path if node >= 0}
        rows += len(visited) + (len(visited & set(parents)) if args[2] is not None else 0)
    return Work(4 * vocabulary * rows + batch * (24 * nodes + 12), 2 * vocabulary * rows)


OPERATION = Operation(
    name="tree_rejection",
    cases=tuple(
        _case(batch, nodes, vocabulary, kind)
        for vocabulary, nodes in ((131_072, 16), (32_000, 64), (131_072, 64))
        for kind in range(3)
        for batch in (1, 8)
    ),
    small=tuple(_case(2, 8, 100, kind) for kind in range(3)),
    inputs=_inputs,
    work=_work,
)
