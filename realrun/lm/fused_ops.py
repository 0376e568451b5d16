"""The elementwise operations of the static cache's pass, plain or fused by torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from realrun.lm.llama import rms_norm


def add_norm(
    x: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add, and normalise the sum. All [rows, hidden]."""
    x = x + change
    return x, rms_norm(x, weight, eps)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Compute the rotated query [rows, Hq, D]; keys and values go to their slots in [B, Hkv, capacity, D].

    qkv : [rows, (Hq + 2 Hkv) * D]; cos, sin : [rows, 1, D], the sine signed as for `roll`
    rows, slots : [rows], each new token's sequence and slot
    """
    head_dim, kv_heads = keys.shape[-1], keys.shape[1]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split(
        [qkv.shape[-1] // head_dim - 2 * kv_heads, kv_heads, kv_heads], dim=1
    )
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    keys[rows, :, slots] = torch.addcmul(k * cos, k.roll(head_dim // 2, dims=-1), sin)
    values[rows, :, slots] = v
    return torch.addcmul(q * cos, q.roll(head_dim // 2, dims=-1), sin)


def gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply the SiLU of the first half by the second: [rows, 2 * intermediate] -> [rows, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class ElementwiseOps:
    """The elementwise operations of a pass, plain or compiled."""

    norm: Callable[..., torch.Tensor]
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotate_and_store: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor]


PLAIN = ElementwiseOps(rms_norm, add_norm, rotate_and_store, gate)


@cache
def compiled_ops() -> ElementwiseOps:
    # Every model shape takes a variant; a grid of models soon exceeds the default of 8.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    rows, buffer = (0,), (0, 2)
    return ElementwiseOps(
        _compiled(rms_norm, rows),
        _compiled(add_norm, rows, rows),
        _compiled(rotate_and_store, rows, rows, rows, rows, rows, buffer, buffer),
        _compiled(gate, rows),
    )


def _compiled(function: Callable[..., Any], *free: tuple[int, ...]) -> Callable[..., Any]:
    """Compile for fixed shapes, except for these dimensions of the first arguments: rows, batch, capacity.

    A variant for every number of rows and every batch would take minutes to compile.
    """
    fast = torch.compile(function, dynamic=False, fullgraph=True)

    def call(*args: Any) -> Any:
        for tensor, dimensions in zip(args, free, strict=False):
            for dimension in dimensions:
                if tensor.shape[dimension] > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch's compiler
            return fast(*args)

    return call
