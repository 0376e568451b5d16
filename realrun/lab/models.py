"""Shapes of the lab's two models."""

from __future__ import annotations

from typing import Any, Literal

from transformers import LlamaConfig

Role = Literal["target", "draft"]

VOCAB_SIZE = 2048
MAX_POSITIONS = 1024
END_OF_TEXT_ID = 0


def lab_config(role: Role) -> LlamaConfig:
    """Llama architecture, grouped-query attention, tied embeddings.

    target: 8 layers of width 256, 6.2 M parameters. draft: one layer of width 384, 2.9 M;
    depth costs time at batch 1, width hardly does.
    """
    shape: dict[str, Any] = {
        "target": {
            "num_hidden_layers": 8,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_attention_heads": 4,
        },
        "draft": {
            "num_hidden_layers": 1,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_attention_heads": 6,
        },
    }[role]
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
        **shape,
    )
