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
from specsim.io.errors import InputError
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
HYBRID = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
QWEN = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight")
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
    offset: int = 0  # what is added to the weights of norms


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
    "Qwen3-Next": Family(
        lambda: hf.Qwen3NextConfig(
            **many(**HEADS, **LINEAR), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16, layer_types=HYBRID,
        ),
        QWEN, "mtp.", "layers.0.", masks_first=False, offset=1,
    ),
    "Qwen3.5": Family(
        lambda: hf.Qwen3_5TextConfig(**many(**HEADS, **LINEAR), layer_types=HYBRID),
        QWEN, "mtp.", "layers.0.", masks_first=False, offset=1,
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
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    parameter *= 0.2 if number < LAYERS else 0.1

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = model.config.hidden_size
    model.model.norm.weight.data += 0.1 * noise(size)
    half = [SCALE * torch.eye(size, dtype=torch.float64) + 0.01 * noise(size, size), 0.03 * noise(size, size)]
    projection = torch.cat(half if family.embedding_first else half[::-1], dim=1)
    norms = [1 - family.offset + scale * noise(size) for scale in (0.1, 0.2, 0.05)]
    own = [*norms[:2], projection, norms[2]]
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
    assert check_decoding(pair) > 3


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return change


def wider(weights: dict[str, torch.Tensor]) -> None:
    weights["model.mtp_layers.0.input_proj.weight"] = torch.zeros(32, 96)


def only_the_target(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if "mtp" in name]:
        del weights[name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (only_the_target, "ships no MTP module; give another checkpoint or another --drafter"),
        (without("model.mtp_layers.0.hidden_layernorm.weight"), "does not fit .*missing hidden_layernorm.weight"),
        (without("model.mtp_layers.0.self_attn.k_proj.bias"), "does not fit .*missing model.layers.0.self_attn.k_proj"),
        (lambda weights: weights.update({"model.mtp_layers.0.gate": torch.ones(1)}), "unexpected model.layers.0.gate"),
        (wider, r"does not fit .*sizes \[32, 96\] and \[32, 64\]"),
    ],
)
def test_a_module_that_is_not_whole_is_refused(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, tmp_path: Path
) -> None:
    checkpoint(FAMILIES["MiMo"], tmp_path / "a")
    weights = load_file(tmp_path / "a/model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "a/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=says) as caught:
        load_pair(str(tmp_path / "a"), drafter="mtp")
    assert "\n" not in str(caught.value)


def test_other_families_are_refused() -> None:
    with pytest.raises(InputError, match="MTP modules of llama targets are not read, only those of deepseek_v3, "):
        load_pair(drafter="mtp")
