"""Small random Llama and Qwen3 models, and static passes over them with emulated graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import realrun.lm.static.llama
from realrun.lm.static.graphs import Results
from realrun.lm.static.llama import StaticLlama

VOCAB, POSITIONS = 89, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
# Sums in another order differ by rounding, which the norms' float32 can enlarge where it tips over.
FLOAT64 = {"rtol": 0, "atol": 1e-10}


def small_model(kind: str = "llama", **changes: object) -> LlamaForCausalLM | MistralForCausalLM:
    torch.manual_seed(0)
    settings = SIZES | changes
    if kind == "mistral":
        return MistralForCausalLM(MistralConfig(**settings)).double().eval()
    return LlamaForCausalLM(LlamaConfig(**settings)).double().eval()


def qwen3(**changes: object) -> Qwen3ForCausalLM:
    """Its head norms are random: ones would hide an exchange."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 16, **changes})).double().eval()
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


def with_garbage(lm: StaticLlama) -> StaticLlama:
    """Slots that nothing may read hold NaN."""
    lm.keys.fill_(math.nan)
    lm.values.fill_(math.nan)
    return lm


class Recorder:
    """Stands in for Graphs: runs the recorded function anew, into the address of its first result."""

    def __init__(self, device: torch.device):
        self.captured = 0

    def capture(self, run: Callable[[], Results], changed: Iterable[torch.Tensor] = ()) -> Callable[[], Results]:
        self.captured += 1
        before = [(tensor, tensor.clone()) for tensor in changed]
        results = tuple(result.clone() for result in run())
        for tensor, value in before:
            tensor.copy_(value)

        def replay() -> Results:
            for result, new in zip(results, run(), strict=True):
                result.copy_(new)
            return results

        return replay


@contextmanager
def recorded(model: LlamaForCausalLM, **options: Any) -> Iterator[tuple[StaticLlama, Recorder]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realrun.lm.static.llama, "Graphs", Recorder)
        lm = StaticLlama(model, graphs=True, **options)
    assert isinstance(lm.recorded.graphs, Recorder)
    yield lm, lm.recorded.graphs
