"""Every causal model_type of transformers has as many parameters as its class on the meta device, or is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from specsim.cost.roofline.architecture import public_shapes
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.drafters import drafter_config
from specsim.cost.roofline.families import architecture_from_config, families
from specsim.cost.roofline.hardware import Hardware
from specsim.cost.roofline.passes import Roofline
from specsim.cost.roofline.shape import Attending, LinearAttention
from specsim.io.errors import InputError
from tests.support.active_weights import active_weights, flops_of_weights

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL  # noqa: E402

ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Settings that a family's config needs because its defaults are missing or unsuitable for its class.
NEEDED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 20,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "dbrx": {"attn_config": {"clip_qkv": 8, "rope_theta": 1e4, "kv_n_heads": 8}, "num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "gemma3n_text": {"num_kv_shared_layers": 15},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe"] * 9 + ["full_attention", "mlp"] * 2,
        "moe_latent_size": 1024,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 8,
        "ple_layer_ids": [1],
        "eos_token_id": 1,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    },
}
PLAIN = Hardware("plain", memory_bytes_s=1e12, flops={"bfloat16": 1e14})


def text_config(family: str) -> Any:
    """The default configuration of the family, or that of its text model."""
    made = transformers.CONFIG_MAPPING[family](**NEEDED.get(family, {}))
    text = made.get_text_config(decoder=True)
    if text is made or text.model_type not in CAUSAL:
        return made
    return type(text)(**NEEDED.get(text.model_type, {}))


def used(weight: Any, config: Any) -> int:
    """Elements of a parameter, without LongCat's zero experts, which return their input and are never read."""
    idle = getattr(config, "zero_expert_num", 0)
    all_experts = idle and weight.dim() == 3 and len(weight) == config.n_routed_experts + idle
    return int(weight.numel() - idle * weight[0].numel() if all_experts else weight.numel())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, by some classes
@pytest.mark.parametrize("family", sorted(CAUSAL))
def test_a_family_has_as_many_parameters_as_its_class_or_is_refused_with_a_reason(family: str) -> None:
    if family in families().refused:
        with pytest.raises(InputError, match="whose passes are not priced: .*[a-z]"):
            architecture_from_config(ModelConfig({"model_type": family}, family))
        return
    config = text_config(family)
    content = json.loads(config.to_json_string(use_diff=False))
    if content["model_type"] in families().refused:
        return
    model = architecture_from_config(ModelConfig(content, family))
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(used(w, config) for name, w in whole.named_parameters() if "embed_tokens_extend" not in name)
    assert model.parameters == pytest.approx(weights, rel=1e-3)
    unsaid = {key: value for key, value in content.items() if key != "tie_word_embeddings"}
    assert architecture_from_config(ModelConfig(unsaid, family)) == model  # published configs leave out defaults
    assert flops_of_weights(Roofline(model, PLAIN)) == pytest.approx(
        2 * (active_weights(model) - model.norms), rel=1e-9
    )
    one, four = (float(Roofline(model, PLAIN).seconds(n, 5000)) for n in (1, 4))
    assert 0 < one < four


@pytest.mark.parametrize("offset", [0, 2])
def test_jambas_experts_are_in_the_layers_that_its_config_names(offset: int) -> None:
    """One of three layers, so that the other choice has other parameters."""
    config = transformers.JambaConfig(num_hidden_layers=7, expert_layer_period=3, expert_layer_offset=offset)
    with torch.device("meta"):
        whole = transformers.AutoModelForCausalLM.from_config(config)
    model = architecture_from_config(ModelConfig(json.loads(config.to_json_string(use_diff=False)), "jamba"))
    assert model.parameters == pytest.approx(sum(weight.numel() for weight in whole.parameters()), rel=1e-3)


CACHED = (
    "gemma4_text", "mimo_v2_flash", "laguna", "gpt_oss", "llama4_text", "falcon", "granite_swa", "qwen3_next",
    "qwen3_5_text", "olmo_hybrid", "falcon_h1", "jamba", "mamba", "mamba2", "falcon_mamba", "nemotron_h", "lfm2_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", CACHED)
def test_a_cache_of_few_tokens_holds_what_the_librarys_own_holds(family: str) -> None:
    """Keys, values and states after 8 tokens on the meta device; the library keeps one more token per convolution."""
    config, tokens = text_config(family), 8
    model = architecture_from_config(ModelConfig(json.loads(config.to_json_string(use_diff=False)), family))
    config._experts_implementation = "batched_mm"  # has no shapes that depend on data
    with torch.device("meta"), torch.no_grad():
        whole = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        answer = whole(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
    cache = answer.get("past_key_values") or answer.get("cache_params")
    leaves = torch.utils._pytree.tree_leaves([vars(layer) for layer in cache.layers])
    held = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 1)
    expected = 0
    for block, count in model.blocks.items():
        if isinstance(block, Attending):
            expected += count * tokens * block.cached_width
        elif isinstance(block, LinearAttention):
            expected += count * (block.state_size + block.kernel * block.convolved_width)
    assert held == expected


def test_kimi_linears_recurrent_layers_have_heads_of_their_own() -> None:
    """As its config.json names them, which transformers has no class for: 3 heads of 16, whatever attention has."""
    config = {
        "model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 256,
        "tie_word_embeddings": False,
        "linear_attn_config": {"full_attn_layers": [4], "num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 5},
    }  # fmt: skip
    layers = architecture_from_config(ModelConfig(config, "config.json")).layers
    found = [[block for block in layer if isinstance(block, LinearAttention)] for layer in layers]
    recurrent = [block for blocks in found for block in blocks]
    assert [len(blocks) for blocks in found] == [1, 1, 1, 0]
    assert {(b.heads, b.state_size, b.convolved_width, b.kernel) for b in recurrent} == {(3, 3 * 16 * 16, 3 * 48, 5)}


@pytest.mark.parametrize("key", ["medusa_num_heads", "num_heads"])
def test_medusas_heads_have_two_names(key: str) -> None:
    found = drafter_config(ModelConfig({"architectures": ["MedusaModel"], key: 5}))
    assert found is not None and (found.method, found.heads) == ("medusa", 5)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads"])
def test_no_width_and_no_heads_are_refused(key: str) -> None:
    config = json.loads(transformers.LlamaConfig().to_json_string(use_diff=False)) | {key: 0}
    with pytest.raises(InputError, match="hidden_size or the number of heads is 0"):
        architecture_from_config(ModelConfig(config, "config.json"))


def test_a_damaged_config_is_read_or_refused_in_a_line() -> None:
    rng = random.Random(1)
    values = [0, -1, 1, 3, 2**40, None, "x", [], [1], ["full_attention"], {}, {"a": 1}, 1.5, True, "FS", "M*E-"]
    refusals = []
    for _ in range(500):
        config = dict(rng.choice([*public_shapes().values()]))
        config[rng.choice([*config])] = rng.choice(values)
        try:
            architecture_from_config(ModelConfig(config, "damaged"))
        except InputError as error:
            refusals.append(str(error))
    assert 100 < len(refusals) < 400 and not any("\n" in text for text in refusals)
