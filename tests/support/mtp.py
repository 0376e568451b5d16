"""Tiny targets whose checkpoints ship an MTP module, written as published, and what the module computes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from realrun.pairs.pair import Pair, load_pair
from tests.support.families import EXPERTS, HEADS, LAYERS, LLAMA
from tests.support.pairs.state import layer_alone
from tests.support.tiny import tiny_tokenizer

SCALE = 0.15
DEEPSEEK = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


@dataclass(frozen=True)
class Family:
    """A tiny target, as published: its module's names, and how vLLM runs it."""

    config: type
    settings: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, str, str, str] = DEEPSEEK  # norms of embedding and state, projection, norm
    module: str = f"model.layers.{LAYERS}."
    layer: str = ""
    embedding_first: bool = True
    masks_first: bool = True
    reads_normed: bool = True
    hands_on_normed: bool = True
    model_type: str | None = None
    offset: int = 0  # what is added to the weights of norms


MIXED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
QWEN: dict[str, Any] = {
    "names": ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
    "module": "mtp.", "layer": "layers.0.", "masks_first": False, "offset": 1,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    **HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
FAMILIES = {
    "DeepSeek-V3": Family(
        hf.DeepseekV3Config, {**MIXED, **LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    ),
    "GLM-4.5": Family(
        hf.Glm4MoeConfig, {**MIXED, **HEADS, "use_qk_norm": True, "first_k_dense_replace": 1}, hands_on_normed=False
    ),
    "GLM-4.7-Flash": Family(hf.Glm4MoeLiteConfig, {**MIXED, **LATENT}),
    "MiMo": Family(
        hf.Qwen2Config,
        names=("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
        module="model.mtp_layers.0.", embedding_first=False, reads_normed=False, model_type="mimo",
    ),
    "Qwen3-Next": Family(
        hf.Qwen3NextConfig, {**HYBRID, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}, **QWEN
    ),
    "Qwen3.5": Family(hf.Qwen3_5TextConfig, HYBRID, **QWEN),
}  # fmt: skip


def checkpoint(
    family: Family, folder: Path, dtype: torch.dtype = torch.float64, **sizes: int
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a random target with a module that often agrees with it; the model of all layers, the module's own."""
    torch.manual_seed(3)
    config = family.config(**{**LLAMA, "num_hidden_layers": LAYERS + 1, **family.settings, **sizes})
    options = {"experts_implementation": "eager"}
    model = hf.AutoModelForCausalLM.from_config(config, **options).to(dtype).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    parameter *= 0.2 if number < LAYERS else 0.1

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    size = model.config.hidden_size
    model.model.norm.weight.data += 0.1 * noise(size)
    half = [SCALE * torch.eye(size, dtype=dtype) + 0.01 * noise(size, size), 0.03 * noise(size, size)]
    projection = torch.cat(half if family.embedding_first else half[::-1], dim=1)
    norms = [1 - family.offset + scale * noise(size) for scale in (0.1, 0.2, 0.05)]
    own = [*norms[:2], projection, norms[2]]
    model.save_pretrained(folder)
    weights, facts = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    last = f"model.layers.{LAYERS}."
    named = {
        (family.module + family.layer + name.removeprefix(last) if name.startswith(last) else name): value
        for name, value in weights.items()
    }
    named |= {family.module + name: value for name, value in zip(family.names, own, strict=True)}
    if family.names == DEEPSEEK:
        copied = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        named |= {family.module + name: weights[source].clone() for name, source in copied.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    facts |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for key in ("layer_types", "mlp_layer_types"):
        if facts.get(key):
            facts[key] = facts[key][:LAYERS]
    if family.model_type:
        facts |= {"model_type": family.model_type, "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(facts))
    tiny_tokenizer().save_pretrained(folder)
    return model, dict(zip(family.names, own, strict=True))


@cache
@torch.inference_mode(False)
def mtp_pair() -> Pair:
    """A MiMo target and its module."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(FAMILIES["MiMo"], Path(folder))
        return replace(load_pair(folder, drafter="mtp", dtype="float64"), eos_token_ids=())


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@torch.inference_mode()
def reference(
    family: Family, model: Any, own: dict[str, torch.Tensor], tokens: Sequence[int], depth: int
) -> tuple[list[int], list[float]]:
    """What the module drafts behind these tokens, row by row and without a cache, and the probabilities."""
    inner, eps = model.model, model.config.rms_norm_eps
    embedding_norm, state_norm, projection, norm = (own[name] for name in family.names)
    embedding_norm, state_norm, norm = (weight + family.offset for weight in (embedding_norm, state_norm, norm))
    count = len(tokens) - 1
    if count:
        ahead = inner(input_ids=torch.tensor([tokens[:count]]), use_cache=False, output_hidden_states=True)
        x = ahead.hidden_states[LAYERS][0]
        states = normed(x, inner.norm.weight + family.offset, eps) if family.reads_normed else x
    text, probs, opening = [*tokens], list[float](), int(count > 0)
    if not count:  # no state is before the only token
        states = torch.zeros(1, inner.embed_tokens.weight.shape[1], dtype=torch.float64)
    for _ in range(depth):
        embedded = inner.embed_tokens(torch.tensor(text[opening:]))
        if family.masks_first and opening:
            embedded[0] = 0
        halves = [normed(embedded, embedding_norm, eps), normed(states, state_norm, eps)]
        rows = torch.cat(halves if family.embedding_first else halves[::-1], dim=-1) @ projection.T
        out = layer_alone(inner.layers[LAYERS], inner.rotary_emb, rows)[-1:]
        last = normed(out, norm, eps)
        probabilities = model.lm_head(last[0]).softmax(-1)
        probs.append(float(probabilities.max()))
        text.append(int(probabilities.argmax()))
        states = torch.cat([states, last if family.hands_on_normed else out])
    return text[len(tokens) :], probs
