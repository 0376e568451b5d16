"""Merging attention in Triton: a few rows a program."""

from __future__ import annotations

import torch

from speckernels.runtime.errors import Unsupported
from speckernels.runtime.triton_runtime import INTERPRETED, Variant, launch, tl, triton

ROWS = 8


@triton.jit
def _kernel(out_a, lse_a, out_b, lse_b, out, lse, rows, dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    a = tl.load(lse_a + row, mask=inside, other=float("-inf"))
    b = tl.load(lse_b + row, mask=inside, other=float("-inf"))
    highest = tl.maximum(a, b)
    seen = highest > float("-inf")
    shift = tl.where(seen, highest, 0.0)  # where not, neither part was seen
    weight_a, weight_b = tl.exp(a - shift), tl.exp(b - shift)
    total = tl.where(seen, weight_a + weight_b, 1.0)
    tl.store(lse + row, tl.where(seen, shift + tl.log(total), float("-inf")), mask=inside)
    d = tl.arange(0, BLOCK_D)
    at = row[:, None] * dim + d[None, :]
    stored = inside[:, None] & (d < dim)[None, :]
    of_a = tl.load(out_a + at, mask=stored, other=0.0).to(tl.float32) * (weight_a / total)[:, None]
    of_b = tl.load(out_b + at, mask=stored, other=0.0).to(tl.float32) * (weight_b / total)[:, None]
    tl.store(out + at, (of_a + of_b).to(out.dtype.element_ty), mask=stored)


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if out_a.dtype == torch.float64:
        raise Unsupported("the triton backend merges in float32; give 16 or 32 bits")
    if INTERPRETED and out_a.dtype == torch.bfloat16:  # the interpreter would compute with the raw bits
        wide, lse = merge_attention(out_a.float(), lse_a, out_b.float(), lse_b)
        return wide.bfloat16(), lse
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    rows, dim = lse_a.numel(), out_a.shape[3]
    launch(
        _kernel, (triton.cdiv(rows, ROWS),),
        out_a, lse_a, out_b, lse_b, out, lse, rows, dim, ROWS=ROWS, BLOCK_D=triton.next_power_of_2(dim),
    )  # fmt: skip
    return out, lse


def compiled_variants() -> list[Variant]:
    numbers = {"lse_a": "*fp32", "lse_b": "*fp32", "lse": "*fp32", "rows": "i32", "dim": "i32"}
    return [
        Variant(_kernel, dict.fromkeys(("out_a", "out_b", "out"), kind) | numbers, {"ROWS": ROWS, "BLOCK_D": 128})
        for kind in ("*bf16", "*fp32")
    ]
