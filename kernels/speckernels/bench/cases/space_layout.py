"""SPACE's layout of candidates and mask tokens, as a tree."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation
from speckernels.bench.rows import Work


def _case(candidates: int) -> Case:
    return Case("space_layout", {"candidates": candidates}, torch.int32, compiled=candidates == 4)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    return torch.empty(0, dtype=torch.int32, device=generator.device), case.shape["candidates"]


def _public(like: torch.Tensor, candidates: int) -> Any:
    from speckernels.ops.space_layout import space_layout

    return space_layout(candidates, like.device)


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Writes parent 4, flag 1 and group 4 bytes for each of the 1 + k (k + 2) nodes; reads nothing."""
    k = case.shape["candidates"]
    return Work(bytes=9 * (1 + k * (k + 2)), flops=0)


OPERATION = Operation(
    name="space_layout",
    cases=tuple(map(_case, (4, 8, 16))),
    small=(_case(3), _case(5)),
    inputs=_inputs,
    work=_work,
    public=_public,
)
