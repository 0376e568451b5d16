"""Tiny random models with recurrent layers, of the families that transformers has, as in `tests.support.families`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from tests.support.families import FAMILIES, HEADS, LLAMA

ALTERNATING = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
UNCOUNTED = {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}

HYBRIDS: dict[str, Callable[[], Any]] = {
    "Qwen3.5": lambda: hf.Qwen3_5TextConfig(**LLAMA, **HEADS, **ALTERNATING, **DELTA),
    "Qwen3-Next": lambda: hf.Qwen3NextConfig(
        **LLAMA, **HEADS, **ALTERNATING, **DELTA, **EXPERTS, shared_expert_intermediate_size=16
    ),
    "Granite-4-H": lambda: hf.GraniteMoeHybridConfig(
        **LLAMA,
        **MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        mamba_expand=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "Nemotron-H": lambda: hf.NemotronHConfig(
        **UNCOUNTED,
        **HEADS,
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
    ),
    "Falcon-H1": lambda: hf.FalconH1Config(**LLAMA, **MAMBA, mamba_d_ssm=64),
    "Kimi-Linear": lambda: hf.KimiLinearConfig(
        **{**LLAMA, "num_key_value_heads": 4},
        **ALTERNATING,
        **LATENT,
        linear_head_dim=8,
        linear_num_heads=4,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        num_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "OLMo hybrid": lambda: hf.OlmoHybridConfig(**LLAMA, **ALTERNATING, **DELTA),
    "Bamba": lambda: hf.BambaConfig(**LLAMA, **MAMBA, attn_layer_indices=[1], mamba_expand=2),
    "Zamba2": lambda: hf.Zamba2Config(
        **LLAMA,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=8,
    ),
}
JAMBA = "Jamba"  # begins anew in a pass of several tokens
REFUSED = {
    JAMBA: lambda: hf.JambaConfig(
        **LLAMA, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8
    )
}
FAMILIES.update({**HYBRIDS, **REFUSED})
