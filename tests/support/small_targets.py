"""Tiny random targets of several architectures, and a text that can be learned."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from realrun.drafters.self_sd import SelfSDKind
from realrun.pairs.pair import Pair
from tests.support.tiny import POSITIONS, VOCAB, tiny_tokenizer

ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"tie_word_embeddings": False, "sliding_window": None}),
}


def small_target(architecture: str = "llama", dtype: torch.dtype = torch.float64, layers: int = 3) -> Any:
    config, model, special = ARCHITECTURES[architecture]
    settings = config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **special,
    )
    torch.manual_seed(3)
    return model(settings).to(dtype).eval()


def alone(target: Any, eos_token_ids: tuple[int, ...] = ()) -> Pair:
    """A target as `load_target` gives it."""
    return Pair(target, SelfSDKind(), tiny_tokenizer(), "tiny/target", "tiny/target", eos_token_ids)


LINES = "a drafter proposes, the target disposes; what is accepted stays. "


@cache
def lines(count: int) -> str:
    return "".join(f"{number % 10} {LINES[number % 7 :]}\n" for number in range(count))


def text_folder(folder: Path, documents: int = 12, count: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:02d}.txt").write_text(lines(count) + str(number))
    return folder


def quiet(what: str, done: int, total: int) -> None:
    pass
