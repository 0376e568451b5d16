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
from tests.support.tiny import tiny_model, tiny_tokenizer

ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 8}),
    "mistral": (MistralConfig, MistralForCausalLM, {"tie_word_embeddings": False, "sliding_window": None}),
}


def small_target(architecture: str = "llama", dtype: torch.dtype = torch.float64, layers: int = 3) -> Any:
    config, model, special = ARCHITECTURES[architecture]
    return tiny_model(layers, 3, dtype, (config, model), **special)


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
