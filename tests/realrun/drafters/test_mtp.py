"""MTP modules that ship inside a target's checkpoint: read, recorded and decoded as they compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import Prompt
from tests.support.families import HEADS, LAYERS, LLAMA, check_decoding
from tests.support.pairs.state import layer_alone
from tests.support.tiny import tiny_prompts, tiny_tokenizer

MIXED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
DEPTH, TOKENS, SCALE = 3, 20, 0.15
DEEPSEEK = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


@dataclass(frozen=True)
class Family:
    """A tiny target, as published: its module's names, and how vLLM runs it."""

    config: Callable[[], Any]
    names: tuple[str, str, str, str] = DEEPSEEK  # norms of embedding and state, projection, norm
    module: str = f"model.layers.{LAYERS}."
    layer: str = ""
    embedding_first: bool = True
    masks_first: bool = True
    reads_normed: bool = True
    hands_on_normed: bool = True
    model_type: str | None = None


def many(**settings: Any) -> dict[str, Any]:
    """A layer more than the target has: the module's."""
    return {**LLAMA, "num_hidden_layers": LAYERS + 1, **settings}


FAMILIES = {
    "DeepSeek-V3": Family(lambda: hf.DeepseekV3Config(**many(**MIXED, **LATENT), n_group=2, topk_group=1)),
    "GLM-4.5": Family(lambda: hf.Glm4MoeConfig(**many(**MIXED, **HEADS), use_qk_norm=True), hands_on_normed=False),
    "GLM-4.7-Flash": Family(
        lambda: hf.Glm4MoeLiteConfig(**many(**{k: v for k, v in MIXED.items() if k[0] != "f"}, **LATENT))
    ),
    "MiMo": Family(
        lambda: hf.Qwen2Config(**many()),
        ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"),
        "model.mtp_layers.0.", embedding_first=False, reads_normed=False, model_type="mimo",
    ),
}  # fmt: skip


def checkpoint(family: Family, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a random target with a module that often agrees with it; the model of all layers, the module's own."""
    torch.manual_seed(3)
    options = {"experts_implementation": "eager"}
    model = hf.AutoModelForCausalLM.from_config(family.config(), **options).double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    parameter *= 0.2 if number < LAYERS else 0.1

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = model.config.hidden_size
    model.model.norm.weight.data += 0.1 * noise(size)
    half = [SCALE * torch.eye(size, dtype=torch.float64) + 0.01 * noise(size, size), 0.03 * noise(size, size)]
    projection = torch.cat(half if family.embedding_first else half[::-1], dim=1)
    own = [1 + 0.1 * noise(size), 1 + 0.2 * noise(size), projection, 1 + 0.05 * noise(size)]
    model.save_pretrained(folder)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    last = f"model.layers.{LAYERS}."
    named = {
        (family.module + family.layer + name.removeprefix(last) if name.startswith(last) else name): value
        for name, value in weights.items()
    }
    named |= {family.module + name: value for name, value in zip(family.names, own, strict=True)}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:LAYERS]
    if family.model_type:
        config |= {"model_type": family.model_type, "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save_pretrained(folder)
    return model, dict(zip(family.names, own, strict=True))


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@torch.inference_mode()
def reference(
    family: Family, model: Any, own: dict[str, torch.Tensor], tokens: Sequence[int], depth: int
) -> tuple[list[int], list[float]]:
    """What the module drafts behind these tokens, row by row and without a cache, and the probabilities."""
    inner, eps = model.model, model.config.rms_norm_eps
    embedding_norm, state_norm, projection, norm = (own[name] for name in family.names)
    count = len(tokens) - 1
    x = inner.embed_tokens(torch.tensor(tokens[:count], dtype=torch.long))
    for layer in inner.layers[:LAYERS] if count else ():
        x = layer_alone(layer, inner.rotary_emb, x)
    states = normed(x, inner.norm.weight, eps) if family.reads_normed else x
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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_module_drafts_as_it_computes(name: str, tmp_path: Path) -> None:
    """At every position and up to K = 3, recorded and decoded; the text is the target's own."""
    family = FAMILIES[name]
    model, own = checkpoint(family, tmp_path / "a")
    pair = load_pair(str(tmp_path / "a"), drafter="mtp", dtype="float64")
    assert (pair.draft_name, pair.drafter.name, pair.drafter.facts) == ("mtp", "mtp", {"modules": 1})
    pair = replace(pair, eos_token_ids=())
    prompts = [Prompt("one", [17]), *tiny_prompts(2, seed=7)]
    trace = record(pair, prompts, RecordSettings(DEPTH, TOKENS, Sampler()))
    for sequence, prompt in enumerate(prompts):
        rows = range(*trace.offsets[sequence : sequence + 2])
        text = trace.token[rows].tolist()
        for t, row in enumerate(rows):
            drafted, probs = reference(family, model, own, [*prompt.tokens, *text[:t]], DEPTH)
            assert trace.draft_token[row].tolist() == drafted
            assert trace.prob[row] == pytest.approx(probs, abs=1e-6)
    accepted = check_decoding(pair)
    print(name, "accepted", accepted)
    assert accepted > 0
