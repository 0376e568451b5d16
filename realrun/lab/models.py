"""Shapes of the lab's two models."""

from __future__ import annotations

from typing import Literal

from transformers import LlamaConfig

Role = Literal["target", "draft"]
Size = Literal["embedded", "large", "smoke"]

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
END_OF_TEXT_ID = 0

# (layers, width, MLP width, query heads, key-value heads)
_SHAPES: dict[Size, dict[Role, tuple[int, int, int, int, int]]] = {
    "embedded": {"target": (8, 256, 704, 4, 2), "draft": (1, 256, 704, 4, 2)},
    "large": {"target": (16, 512, 1408, 8, 4), "draft": (1, 512, 1408, 8, 4)},
    "smoke": {"target": (2, 64, 176, 2, 1), "draft": (1, 32, 88, 2, 1)},
}


def lab_config(role: Role, size: Size = "embedded") -> LlamaConfig:
    """Llama architecture, grouped-query attention, tied embeddings.

    embedded: the shipped pair, target 6.4 M parameters, draft 1.3 M. large: target 48.2 M,
    draft 4.0 M, for a GPU. smoke: for tests, trained in seconds.
    """
    layers, width, mlp_width, heads, kv_heads = _SHAPES[size][role]
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=mlp_width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )
