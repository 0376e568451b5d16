"""The deepest path of a tree that agrees with the target's choices."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, random_tree
from speckernels.bench.rows import Work

ALPHABET = 3  # few tokens, so that paths of some length agree


def _case(batch: int, nodes: int) -> Case:
    return Case("greedy_verify", {"batch": batch, "nodes": nodes}, torch.int64, compiled=nodes <= 16)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    batch, nodes = case.shape["batch"], case.shape["nodes"]
    tokens, choices = (
        torch.randint(0, ALPHABET, (batch, nodes), generator=generator, device=generator.device) for _ in range(2)
    )
    return tokens, random_tree(nodes, batch, generator), choices


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Reads tokens, parents, choices (20 bytes a node); writes path and emitted tokens (12), and a count."""
    batch, nodes = case.shape["batch"], case.shape["nodes"]
    return Work(bytes=batch * (32 * nodes + 4), flops=0)


OPERATION = Operation(
    name="greedy_verify",
    cases=tuple(_case(batch, nodes) for nodes in (64, 8, 128, 16, 32) for batch in (1, 8, 64)),
    small=(_case(1, 8), _case(2, 40)),
    inputs=_inputs,
    work=_work,
)
