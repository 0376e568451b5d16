"""Mask bits, positions and links of trees from their parents."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, random_tree
from speckernels.bench.rows import Work


def _case(batch: int, nodes: int) -> Case:
    return Case("tree_metadata", {"batch": batch, "nodes": nodes}, torch.int32, compiled=nodes <= 16)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    batch, nodes = case.shape["batch"], case.shape["nodes"]
    context_lens = torch.randint(0, 32768, (batch,), generator=generator, device=generator.device, dtype=torch.int32)
    return random_tree(nodes, batch, generator), context_lens


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads parents and contexts (4 B n + 4 B); writes mask words, positions and two links (4 w + 16 bytes a node)."""
    batch, nodes = case.shape["batch"], case.shape["nodes"]
    words = (nodes + 31) // 32
    return Work(bytes=batch * (4 * nodes + 4 + nodes * (4 * words + 16)), flops=0)


OPERATION = Operation(
    name="tree_metadata",
    cases=tuple(_case(batch, nodes) for nodes in (64, 8, 128, 16, 32) for batch in (1, 8)),
    small=(_case(1, 8), _case(2, 40)),
    inputs=_inputs,
    work=_work,
)
