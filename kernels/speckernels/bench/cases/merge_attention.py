"""Joining attention over a shared prefix with attention over the rest."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, relative_error
from speckernels.bench.rows import Work

ERRORS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def _case(batch: int, nodes: int, heads: int, head: int, dtype: torch.dtype) -> Case:
    return Case("merge_attention", {"batch": batch, "nodes": nodes, "q_heads": heads, "head": head}, dtype)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    rows = [case.shape[name] for name in ("batch", "nodes", "q_heads")]
    outs = [normal(*rows, case.shape["head"]).to(case.dtype) for _ in range(2)]
    lses = [8 + normal(*rows) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Two results with their logarithms are read and one is written: 3 rows (D s + 4) bytes for s-byte elements."""
    rows = args[1].numel()
    return Work(3 * rows * (case.shape["head"] * case.dtype.itemsize + 4), 4 * rows * case.shape["head"])


def _check(expected: Any, actual: Any, case: Case) -> None:
    relative_error(expected[0], actual[0], ERRORS[case.dtype], "output")
    relative_error(expected[1], actual[1], 1e-5, "log-sum-exp")


OPERATION = Operation(
    name="merge_attention",
    cases=tuple(_case(batch, nodes, 32, 128, torch.bfloat16) for nodes in (64, 8) for batch in (1, 8)),
    small=(_case(2, 5, 3, 40, torch.float32),),
    inputs=_inputs,
    work=_work,
    check=_check,
)
