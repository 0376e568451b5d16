"""Moving the accepted nodes' keys and values to the front, in place, for all layers."""

from __future__ import annotations

from typing import Any

import torch

from speckernels.bench.cases.base import Arguments, Case, Operation, Work


def _case(batch: int, nodes: int, layers: int, context: int = 1024, heads: int = 8, head: int = 128) -> Case:
    shape = {"batch": batch, "moved": 8, "nodes": nodes, "layers": layers, "context": context}
    shape |= {"kv_heads": heads, "head": head}
    return Case("compact_kv", shape, torch.bfloat16)


def _inputs(case: Case, generator: torch.Generator) -> Arguments:
    sizes = case.shape
    device = generator.device
    batch, moved = sizes["batch"], sizes["moved"]
    cache = (batch, sizes["kv_heads"], sizes["context"] + sizes["nodes"], sizes["head"])

    def layers() -> list[torch.Tensor]:
        return [torch.randn(cache, generator=generator, device=device).to(case.dtype) for _ in range(sizes["layers"])]

    # The root stays; the accepted nodes lie among the others, so that each has to move.
    others = torch.stack([torch.randperm(sizes["nodes"] - 2, generator=generator, device=device) for _ in range(batch)])
    path = torch.full((batch, sizes["nodes"]), -1, dtype=torch.int32, device=device)
    path[:, 0] = 0
    path[:, 1 : moved + 1] = (2 + others[:, :moved]).sort(-1).values.int()
    context_lens = torch.full((batch,), sizes["context"], dtype=torch.int32, device=device)
    return layers(), layers(), path, context_lens


def _work(case: Case, args: Arguments, expected: Any) -> Work:
    """Each moved slot is read and written once, of keys and of values: 4 s H D bytes a layer for s-byte elements."""
    sizes = case.shape
    slot = sizes["kv_heads"] * sizes["head"] * case.dtype.itemsize
    path = args[2].cpu()
    index = torch.arange(path.shape[1])
    moved = int(((path >= 0) & (path != index)).sum())
    return Work(4 * slot * moved * sizes["layers"], 0)


OPERATION = Operation(
    name="compact_kv",
    cases=(_case(1, 64, 32), _case(8, 64, 32), _case(1, 128, 80), _case(1, 16, 32)),
    small=(_case(2, 16, 3, context=20, heads=2, head=16),),
    inputs=_inputs,
    work=_work,
    in_place=True,
)
