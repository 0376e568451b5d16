"""Tiny random targets of several architectures and attentions, and what their layers did in a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.small_targets import small_target
from tests.support.tiny import tiny_model

LAYERS = 4
LEAN = ("llama", "qwen3")
LIBRARY = ("llama-bias", "qwen2-sdpa", "qwen2-eager", "mistral-sdpa", "mistral-eager")
NAMES = (*LEAN, *LIBRARY)


def close_to(name: str) -> dict[str, float]:
    """How closely passes of this target agree: sums in another order round otherwise.

    The library's eager attention takes its softmax in float32 whatever the model's type.
    """
    return {"rtol": 0.0, "atol": 2e-5 if name.endswith("eager") else 1e-10}


@cache
def target_of(name: str, layers: int = LAYERS) -> Any:
    """In float64; those of LEAN go through fused parts, those of LIBRARY through the library's."""
    if name == "llama-bias":
        return biased(layers)
    architecture, _, attention = name.partition("-")
    model = small_target(architecture, layers=layers)
    for number, layer in enumerate(model.model.layers):  # early layers decide much, so that drafts are often right
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data *= 0.6**number
    for parameter in model.parameters():  # biases and norms that do nothing would hide their lack
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.set_attn_implementation(attention or "sdpa")
    return model


def biased(layers: int) -> Any:
    model = tiny_model(layers, 8, initializer_range=0.12, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def stacked(stack: Any, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [Hkv, length, D] of every layer of a stack."""
    if hasattr(stack, "buffers"):
        return [(keys[0, :, :length], values[0, :, :length]) for keys, values in stack.buffers.values()]
    return [(keys[:, :length], values[:, :length]) for keys, values in zip(stack.keys, stack.values, strict=True)]


@dataclass
class Rows:
    """Rows through every layer's attention and MLP, as a number each; calls of them."""

    rows: Counter[tuple[int, str]]
    calls: Counter[tuple[int, str]]

    def of(self, layers: range) -> set[tuple[int, int]]:
        """(rows, calls) that the sublayers of these layers had; a single pair where all had the same."""
        return {(self.rows[i, part], self.calls[i, part]) for i in layers for part in ("attention", "mlp")}


@contextmanager
def counted(layers: list[Any], monkeypatch: Any) -> Iterator[Rows]:
    """Count what goes through the last projections of these layers' sublayers, in whatever pass.

    Both kinds of pieces, and the library's own models, multiply by the same weights.
    """
    names = {}
    for number, layer in enumerate(layers):
        names[layer.self_attn.o_proj.weight.data_ptr()] = (number, "attention")
        names[layer.mlp.down_proj.weight.data_ptr()] = (number, "mlp")
    counts = Rows(Counter(), Counter())
    linear: Callable[..., torch.Tensor] = F.linear

    def count(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        name = names.get(weight.data_ptr())
        if name:
            counts.rows[name] += x.shape[:-1].numel()
            counts.calls[name] += 1
        return linear(x, weight, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", count)
        yield counts
