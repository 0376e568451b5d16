"""Shapes of the lab's two models."""

from __future__ import annotations

from typing import Literal

from transformers import LlamaConfig

Role = Literal["target", "draft"]

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
END_OF_TEXT_ID = 0


def lab_config(role: Role) -> LlamaConfig:
    """Llama architecture, grouped-query attention, tied embeddings, width 256.

    target: 8 layers, 6.2 M parameters. draft: one layer, 1.2 M.
    """
    layers: dict[Role, int] = {"target": 8, "draft": 1}
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=layers[role],
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )
