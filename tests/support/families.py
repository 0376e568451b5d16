"""Tiny random models of many families, and whether a drafter serves each: made, recorded and decoded, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.drafters.lookup import LookupKind
from realrun.drafters.self_sd import SelfSDKind
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.cached import layer_types
from realrun.lm.recurrent import check_continues
from realrun.lm.variants import SkippedSublayers, config_of_layers
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import load_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.small_targets import alone
from tests.support.tiny import POSITIONS, VOCAB, tiny_prompts
from tests.support.trainings import CASES, LOOP

WINDOW = 8  # of all layers with a window; texts are longer
LAYERS = 3
DEPTH, WIDTH, TOKENS = 3, 2, 20
TREE_NODES = 2 + 4 + 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SHARED = {
    **LLAMA, "num_hidden_layers": 4, **HEADS, "sliding_window": WINDOW, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
MIXED = {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
MULTIPLIERS = {
    "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
LLAMA3_ROTARY = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32,
}  # fmt: skip
PLAIN_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
OF_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**LLAMA),
    "Qwen2": lambda: hf.Qwen2Config(**LLAMA),
    "Qwen2, with windows": lambda: hf.Qwen2Config(**LLAMA, **OF_QWEN),
    "Qwen3": lambda: hf.Qwen3Config(**LLAMA, **HEADS),
    "Gemma": lambda: hf.GemmaConfig(**LLAMA, **HEADS),
    "Gemma 2": lambda: hf.Gemma2Config(**LLAMA, **HEADS, **WINDOWS, query_pre_attn_scalar=8),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**LLAMA, **HEADS, **WINDOWS, query_pre_attn_scalar=8),
    "Phi-3": lambda: hf.Phi3Config(**LLAMA, sliding_window=None),
    "GPT-2": lambda: hf.GPT2Config(**SIZES),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**SIZES, intermediate_size=64),
    "OLMo2": lambda: hf.Olmo2Config(**LLAMA),
    "Mistral, with a window": lambda: hf.MistralConfig(**LLAMA, sliding_window=WINDOW),
    "Mistral": lambda: hf.MistralConfig(**LLAMA, sliding_window=None),
    "Mixtral": lambda: hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": lambda: hf.Qwen2MoeConfig(**LLAMA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**LLAMA, **EXPERTS, **HEADS, num_experts=4),
    "gpt-oss": lambda: hf.GptOssConfig(
        **LLAMA, **HEADS, **WINDOWS, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN_ROTARY
    ),
    "Llama 3.1": lambda: hf.LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROTARY),
    "gpt-oss, yarn": lambda: hf.GptOssConfig(
        **LLAMA, **HEADS, **WINDOWS, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN
    ),
    "Gemma 4": lambda: hf.Gemma4TextConfig(  # which writes into the list that it is given
        **LLAMA, **HEADS, **copy.deepcopy(WINDOWS), hidden_size_per_layer_input=0, global_head_dim=16
    ),
    "Gemma 4 E": lambda: hf.Gemma4TextConfig(**SHARED),
    "Gemma 3n": lambda: hf.Gemma3nTextConfig(**SHARED, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4),
    "Phi-4-mini": lambda: hf.Phi3Config(**LLAMA, sliding_window=None, partial_rotary_factor=0.75),
    "OLMo-3": lambda: hf.Olmo3Config(**LLAMA, **WINDOWS),
    "FlexOlmo": lambda: hf.FlexOlmoConfig(**LLAMA, num_experts=4, num_experts_per_tok=2),
    "SmolLM3": lambda: hf.SmolLM3Config(**LLAMA, no_rope_layers=[1, 1, 0]),
    "DeepSeek-V2": lambda: hf.DeepseekV2Config(**{**LLAMA, **LATENT}, **MIXED, q_lora_rank=None),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(**{**LLAMA, **LATENT}, **MIXED, q_lora_rank=16, n_group=2, topk_group=1),
    "GLM-4": lambda: hf.Glm4Config(**LLAMA, **HEADS),
    "GLM-4.5": lambda: hf.Glm4MoeConfig(**LLAMA, **HEADS, **MIXED, use_qk_norm=True),
    "GLM-4.7 Flash": lambda: hf.Glm4MoeLiteConfig(**{**LLAMA, **LATENT}, **MIXED, q_lora_rank=16),
    "dots1": lambda: hf.Dots1Config(**LLAMA, **MIXED),
    "MiniMax-M2": lambda: hf.MiniMaxM2Config(**LLAMA, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "Ministral-3": lambda: hf.Ministral3Config(**LLAMA, **HEADS),
    "Seed-OSS": lambda: hf.SeedOssConfig(**LLAMA, **HEADS),
    "ERNIE-4.5": lambda: hf.Ernie4_5Config(**LLAMA, **HEADS),
    "Hunyuan": lambda: hf.HunYuanDenseV1Config(**LLAMA, **HEADS),
    "Arcee": lambda: hf.ArceeConfig(**LLAMA, **HEADS),
    "Apertus": lambda: hf.ApertusConfig(**LLAMA),
    "StableLM-2": lambda: hf.StableLmConfig(**LLAMA, partial_rotary_factor=0.25),
    "Minitron": lambda: hf.NemotronConfig(**LLAMA, partial_rotary_factor=0.5),
    "Granite-3": lambda: hf.GraniteConfig(**LLAMA, **MULTIPLIERS),
    "GraniteMoe": lambda: hf.GraniteMoeConfig(**LLAMA, **MULTIPLIERS, num_local_experts=4, num_experts_per_tok=2),
    "Granite-4, attention alone": lambda: hf.GraniteMoeHybridConfig(
        **LLAMA, **MULTIPLIERS, layer_types=["attention"] * 3, num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=64, position_embedding_type="rope", **MAMBA,
    ),
    "Command-A": lambda: hf.Cohere2Config(**LLAMA, **WINDOWS, **HEADS, logit_scale=0.25),
    "EXAONE-4": lambda: hf.Exaone4Config(**LLAMA, **WINDOWS, sliding_window_pattern=4),
    "Llama 4": lambda: hf.Llama4TextConfig(
        **{**LLAMA, "intermediate_size": 32}, **HEADS, intermediate_size_mlp=64, num_local_experts=4,
        num_experts_per_tok=1, no_rope_layers=[1, 1, 0], attention_chunk_size=WINDOW,
    ),
    "LFM2": lambda: hf.Lfm2Config(**LLAMA, layer_types=["conv", "full_attention", "conv"]),
    "Qwen3.5": lambda: hf.Qwen3_5TextConfig(**LLAMA, **HEADS, **DELTA),
    "Qwen3-Next": lambda: hf.Qwen3NextConfig(
        **LLAMA, **HEADS, **DELTA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16
    ),
    "Granite-4 H": lambda: hf.GraniteMoeHybridConfig(
        **LLAMA, **MAMBA, layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64, mamba_expand=2,
    ),
    "Nemotron-H": lambda: hf.NemotronHConfig(
        **{name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}, **HEADS, mamba_num_heads=8,
        layers_block_type=["mamba", "attention", "mlp"], mamba_head_dim=8, ssm_state_size=8, n_groups=2,
    ),
    "Falcon-H1": lambda: hf.FalconH1Config(**LLAMA, **MAMBA, mamba_d_ssm=64),
    "Mamba": lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS),
    "Kimi-Linear": lambda: hf.KimiLinearConfig(
        **{**LLAMA, **LATENT}, q_lora_rank=None, linear_head_dim=8, linear_num_heads=4, num_experts=4,
        layer_types=DELTA["layer_types"], num_experts_per_token=2, moe_intermediate_size=16, num_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "OLMo hybrid": lambda: hf.OlmoHybridConfig(**LLAMA, **DELTA),
    "Bamba": lambda: hf.BambaConfig(**LLAMA, **MAMBA, attn_layer_indices=[1], mamba_expand=2),
    "Zamba2": lambda: hf.Zamba2Config(
        **LLAMA, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8,
    ),
    "Jamba": lambda: hf.JambaConfig(
        **LLAMA, attn_layer_period=2, attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, mamba_d_state=8,
    ),
}  # fmt: skip

# Multimodal checkpoints, by the family of their text model.
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
}
DEEP_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
PROJECTED = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
COMPOSITES: dict[str, Callable[[Any], Any]] = {
    "Gemma 3": lambda text: hf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4),
    "Gemma 4": lambda text: hf.Gemma4Config(text_config=text, vision_config=None, audio_config=None),
    "Gemma 4 E": lambda text: hf.Gemma4Config(text_config=text, vision_config=None, audio_config=None),
    "Mistral": lambda text: hf.Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **VISION}),
    "Ministral-3": lambda text: hf.Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **VISION}),
    "Llama 4": lambda text: hf.Llama4Config(text_config=text, vision_config={**VISION, **PROJECTED}),
    "Qwen3.5": lambda text: hf.Qwen3_5Config(text_config=text, vision_config=DEEP_VISION),
}


@cache
def family_model(family: str) -> Any:
    """In float64, its first layers more decisive than its last, so that drafters of few layers are often right."""
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), experts_implementation="eager").double().eval()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "c_proj.weight", "dense.weight")):
                    parameter *= 0.5**number
    return model


def shallow_draft(target: Any) -> Any:
    """A model of the target's first two layers; if layers share caches, the target without its last MLP."""
    if getattr(target.config, "num_kv_shared_layers", 0):
        draft = copy.deepcopy(target)
        draft.model.layers[-1].mlp.down_proj.weight.data.zero_()
        return draft
    draft = type(target)(config_of_layers(target.config, range(LAYERS - 1))).to(target.dtype).eval()
    wanted = draft.state_dict().keys()
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in wanted})
    return draft


def trained(name: str) -> Callable[[Pair, Path], Pair]:
    """Train a step, and write the file."""

    def make(pair: Pair, folder: Path) -> Pair:
        CASES[name].run(folder, pair, loop=replace(LOOP, steps=1))
        target, drafter = load_drafter(folder, pair.target)
        return replace(pair, target=target, drafter=drafter)

    return make


def skipping(pair: Pair, folder: Path) -> Pair:
    SelfSDKind.check_target(pair.target)
    return replace(pair, drafter=SelfSDKind(SkippedSublayers(frozenset({2}), frozenset({1, 2}))))


MAKERS: dict[str, Callable[[Pair, Path], Pair]] = {
    "draft model": lambda pair, folder: replace(pair, drafter=IndependentKind(shallow_draft(pair.target))),
    "prompt lookup": lambda pair, folder: replace(pair, drafter=LookupKind()),
    "EESD": trained("eesd"),
    "MEDUSA-1": trained("medusa"),
    "MEDUSA-2": trained("medusa one stage"),
    "EDD": trained("edd"),
    "EAGLE": trained("eagle"),
    "EAGLE-3": trained("eagle3"),
    "SPACE": trained("space"),
    "Self-SD": skipping,
}


def outcome(family: str, drafter: str, folder: Path) -> str:
    """What this drafter drafts for this family, "chains" or "chains and trees"; or why it is refused.

    Where it is not refused before anything is written: a step of training, a recording, and decoding whose rounds
    are the replay's and whose text is what the target says by itself.
    """
    target = copy.deepcopy(family_model(family))
    try:
        layer_types(target.config)  # as where a model is loaded
        check_continues(target)
        pair = MAKERS[drafter](alone(target), folder)
    except InputError as error:
        if "\n" in str(error) or any(folder.rglob("*")):
            raise AssertionError(f"not in one line, or not before anything was written: {error}") from error
        return str(error)
    check_decoding(pair)
    return "chains and trees" if pair.trees else "chains"


@torch.inference_mode()
def own_text(target: Any, prompt: list[int]) -> list[int]:
    """What the target says greedily, without a cache and without the loop."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check_decoding(pair: Pair, prompts: list[Prompt] | None = None) -> int:
    """Recorded and decoded alike, and as the target alone; how many drafted tokens were accepted."""
    prompts = prompts or [Prompt("one", [17]), *tiny_prompts(2, seed=7)]
    trees = pair.trees
    settings = RecordSettings(DEPTH, TOKENS, Sampler(), TREE_NODES if trees else 0, WIDTH)
    trace = record(pair, prompts, settings)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    texts, accepted = [own_text(pair.target, prompt.tokens) for prompt in prompts], 0
    policies = [make_policy("fixed_k", {"k": DEPTH})]
    policies += [make_policy("vct", {"width": WIDTH, "depth": DEPTH})] if trees else []
    for policy in policies:
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), log=True)
        runs = [decoder.decode(prompt.tokens, TOKENS, policy, sequence=number) for number, prompt in enumerate(prompts)]
        assert [run.tokens for run in runs] == texts
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0
        accepted += sum(round_.accepted for run in runs for round_ in run.rounds)
    return accepted
